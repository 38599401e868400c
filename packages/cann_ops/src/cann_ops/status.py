"""What was seen of each op: lowered, run in emulation, compiled by CANN, run on a device."""

from __future__ import annotations

import json
from pathlib import Path

from cann_ops.lowering import TILELANG, cache_folder
from cann_ops.shapes import SHAPES


def device_file() -> Path:
    """Where `cann_ops.verify` writes what it saw on a device."""
    return cache_folder() / "device_status.json"


def status() -> dict[str, dict[str, str | list[str]]]:
    """For each op its kernels, and what was done with them.

    "lowered" and "host_emulated" name the version of TileLang for which the project's tests do it; "bisheng_compiled"
    and "npu_run" are "never" until `python -m cann_ops.verify` ran on a machine with an NPU, and its result then.
    """
    seen: dict[str, str] = {}
    if device_file().is_file():
        seen = json.loads(device_file().read_text(encoding="utf-8"))
    kernels: dict[str, list[str]] = {}
    for shape in SHAPES:
        for op in shape.ops:
            kernels.setdefault(op, []).append(str(shape.kernel))
    return {
        op: {
            "kernels": used,
            "lowered": f"tilelang {TILELANG}",
            "host_emulated": f"tilelang {TILELANG}",
            "bisheng_compiled": "never" if op not in seen else "yes",
            "npu_run": seen.get(op, "never"),
        }
        for op, used in sorted(kernels.items())
    }
