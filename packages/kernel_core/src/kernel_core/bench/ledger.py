"""Rows of the ledger: one JSON object a line. Every published number is one of them; unknown is null, not a guess."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import kernel_core
from kernel_core.bench.ceilings import Ceilings
from kernel_core.bench.timing import Timing

FIELDS = (
    "point", "op", "shape", "backend", "median_us", "p10_us", "p90_us", "runs", "bytes", "flops", "ceilings",
    "bound_us", "fraction", "peers", "versions", "digest", "date", "note",
)  # fmt: skip


def bound_us(moved: int, flops: int, ceilings: Ceilings, compute: str = "f32", path: str = "memory") -> float | None:
    """The larger of bytes and operations over their ceiling, in microseconds; None when a needed ceiling is missing.

    Bytes go over the read bandwidth, or over that of a copy where no reads were measured, as on a GPU; with `path`
    "h2d" over the link from the host, with "link" over that to another GPU.
    """
    rate = getattr(ceilings, f"{compute}_tflops")
    links = {"h2d": ceilings.h2d_gbps, "link": ceilings.link_gbps}
    bandwidth = links.get(path, ceilings.read_gbps or ceilings.copy_gbps)
    if (moved and not bandwidth) or (flops and not rate):
        return None
    memory = moved / (bandwidth * 1e3) if moved and bandwidth else 0.0
    arithmetic = flops / (rate * 1e6) if flops and rate else 0.0
    return max(memory, arithmetic)


def ledger_row(
    *,
    point: str,
    op: str,
    shape: Mapping[str, object],
    backend: str,
    timing: Timing,
    bytes: int | None,
    flops: int | None,
    ceilings: Ceilings,
    digest: str | None,
    compute: str = "f32",
    path: str = "memory",
    peers: Sequence[Mapping[str, object]] = (),
    versions: Mapping[str, object] | None = None,
    note: str = "",
) -> dict[str, object]:
    """One row with exactly `FIELDS`. `fraction` is bound over median: 1 is the best that this machine allows."""
    bound = None if bytes is None or flops is None else bound_us(bytes, flops, ceilings, compute, path)
    return {
        "point": point,
        "op": op,
        "shape": dict(shape),
        "backend": backend,
        "median_us": _short(timing.median_us),
        "p10_us": _short(timing.p10_us),
        "p90_us": _short(timing.p90_us),
        "runs": timing.runs,
        "bytes": bytes,
        "flops": flops,
        "ceilings": ceilings.as_dict(),
        "bound_us": None if bound is None else _short(bound),
        "fraction": None if bound is None else _short(bound / timing.median_us),
        "peers": [dict(peer) for peer in peers],
        "versions": dict(versions if versions is not None else cpu_versions()),
        "digest": digest,
        "date": datetime.now(UTC).date().isoformat(),
        "note": note,
    }


def cpu_versions() -> dict[str, object]:
    """What ran: libraries, processor, instruction set, threads, and the load average of the machine."""
    from kernel_core import _native

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel_core": kernel_core.__version__,
        "cpu": _cpu_name(),
        "isa": _native.isa(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Add a row to a ledger file; refuses one whose fields are not `FIELDS`."""
    if tuple(row) != FIELDS:
        odd = sorted(set(row) ^ set(FIELDS))
        raise ValueError(f"row: got fields that differ in {odd or 'order'}, allowed are exactly {', '.join(FIELDS)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """Rows of a ledger file in the order written; none when there is no file."""
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not a JSON object ({error})") from error


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _short(value: float) -> float:
    return float(f"{value:.4g}")
