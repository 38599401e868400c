"""The differentiable path as a judge of the engine: logits from a checkpoint's weights, with nothing quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from orchestrator.model.checkpoint import Checkpoint
from orchestrator.model.engram_tables import EngramTables
from orchestrator.train.export import import_checkpoint
from orchestrator.train.model import TrainModel
from orchestrator.train.phases import Phase

_AS_THEY_ARE = Phase(until=1.0, length=0, batch=1, sparse=True, quantised=False)


def load_reference(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> TrainModel:
    """The backbone of a checkpoint with the stored values of its weights, computing in `dtype`."""
    config, tensors = Checkpoint(folder).config, import_checkpoint(folder)
    model = TrainModel(config, EngramTables.from_checkpoint(folder, config).arrays(), dtype=dtype).eval()
    with torch.no_grad():
        for name, value in model.tensors().items():
            value.copy_(tensors[name])
    return model.requires_grad_(False)


def reference_logits(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from tokens int64 [T] to logits float32 [T, V]: caches unquantised, the selection in force."""
    model = load_reference(folder, dtype=dtype)
    head = model.get("head.weight").to(dtype)
    window = model.config.sliding_window

    @torch.no_grad()
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        padded = F.pad(tokens, (0, -len(tokens) % window))[None]  # causal: what follows changes nothing
        return F.linear(model(padded, _AS_THEY_ARE).hidden[0, : len(tokens)], head).float()

    return logits
