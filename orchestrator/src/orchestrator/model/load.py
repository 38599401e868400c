"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

from pathlib import Path

from orchestrator.model.dense import DenseMode
from orchestrator.model.engram_tables import EngramTables
from orchestrator.model.transformer import Transformer
from orchestrator.model.weights import load_weights


def load_model(path: str | Path, *, dense: DenseMode = "fixed") -> Transformer:
    """Read a checkpoint in the official layout and bind it to the kernels of this machine.

    Raises `orchestrator.model.checkpoint` errors that name the file, the tensor and what to do.
    """
    weights = load_weights(path)
    return Transformer(weights, EngramTables.from_checkpoint(path, weights.config), mode=dense)
