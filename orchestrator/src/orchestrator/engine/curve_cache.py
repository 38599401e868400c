"""Profiled cost curves on disk, each valid for one model on one device with one set of settings, and for a day."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.balance.cost_curve import CostCurve
from orchestrator.engine.cost_profile import profile

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine

MAX_AGE = 24 * 3600.0
_VERSION = 2
_log = logging.getLogger(__name__)


def use_curve(engine: Engine, folder: Path | None, *, max_age: float = MAX_AGE) -> CostCurve | None:
    """Have an engine weigh drafts by what its steps cost: by a curve of `folder` that is valid, else a new one.

    Returns the curve, or None for an engine that does not choose how many drafts it verifies.
    """
    if engine.speculator is None or engine.speculator.fixed:
        return None
    path = None if folder is None else folder / f"{key_of(engine)}.json"
    curve = None if path is None else load(path, max_age=max_age)
    if curve is None:
        curve = profile(engine)
        if path is not None:
            try:
                save(path, curve)
            except OSError as error:  # a folder that cannot be written costs a second at each start
                _log.warning("the cost curve was not kept: %s", error)
    engine.speculator.weigh_by(curve)
    return curve


def key_of(engine: Engine) -> str:
    """Digest of all that a curve depends on."""
    on_gpu = engine.model.device.type == "cuda"
    about = {
        "model": asdict(engine.model.config),
        "settings": [engine.config.max_num_seqs, engine.config.dense, engine.config.quantised_caches, engine.context],
        "depth": 0 if engine.speculator is None else engine.speculator.depth,
        "device": torch.cuda.get_device_name(engine.model.device) if on_gpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=list).encode()).hexdigest()[:24]


def save(path: Path, curve: CostCurve) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": _VERSION, "measured": time.time(), "curve": asdict(curve)})
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def load(path: Path, *, max_age: float = MAX_AGE) -> CostCurve | None:
    """The curve of a file; None if there is none, or it is too old, damaged or of another version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - found["measured"]
        if found["version"] != _VERSION or not 0 <= age <= max_age:
            return None
        return curve_from(found["curve"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def curve_from(values: dict[str, Any]) -> CostCurve:
    """A curve from its fields as JSON has them. Raises ValueError for values that are no curve."""
    try:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return CostCurve(**fields)
    except TypeError as error:
        raise ValueError(f"curve: got {sorted(values)} ({error}), allowed are the fields of a CostCurve") from None
