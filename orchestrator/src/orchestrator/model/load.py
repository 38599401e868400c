"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

from pathlib import Path

from orchestrator.model.dense import DenseMode
from orchestrator.model.device import moved, resolve_device
from orchestrator.model.engram_tables import EngramTables
from orchestrator.model.transformer import Transformer
from orchestrator.model.weights import ExpertsOf, load_weights


def load_model(
    path: str | Path,
    *,
    dense: DenseMode = "fixed",
    device: str = "cpu",
    experts: ExpertsOf = ("layers", "mtp"),
    vision: bool = True,
) -> Transformer:
    """Read a checkpoint in the official layout and bind it to the kernels of this machine.

    `device` is "cpu" or "cuda"; `experts` and `vision` as in `load_weights`, for a rank of several that holds its own
    share, and for an engine whose images are encoded elsewhere. Raises ValueError where it cannot be used, and
    `orchestrator.model.checkpoint` errors that name the file, the tensor and what to do.
    """
    place = resolve_device(device)
    weights = load_weights(path, experts, vision)
    tables = EngramTables.from_checkpoint(path, weights.config)
    return Transformer(moved(weights, place), moved(tables, place), mode=dense)
