"""Where a rank gets an expert's weights that no other rank can give it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.weights import ModelWeights


class ExpertSource(Protocol):
    """Every backbone expert by layer and logical number."""

    def read(self, layer: int, expert: int) -> torch.Tensor:
        """All bytes of one expert in the order of `ExpertPool`, uint8 [expert_bytes]."""


class LoadedExperts:
    """Experts of a model that is in memory."""

    def __init__(self, weights: ModelWeights) -> None:
        self._experts = [layer.experts for layer in weights.layers]

    def read(self, layer: int, expert: int) -> torch.Tensor:
        e = self._experts[layer]
        return torch.cat([t[expert].flatten() for t in (e.w13, e.s13, e.w2, e.s2)])


class CheckpointExperts:
    """Experts read from a checkpoint folder, one at a time."""

    def __init__(self, folder: str | Path) -> None:
        self._checkpoint = Checkpoint(folder)

    def read(self, layer: int, expert: int) -> torch.Tensor:
        prefix = f"layers.{layer}.ffn.experts.{expert}"
        names = ("w1.weight", "w3.weight", "w1.scale", "w3.scale", "w2.weight", "w2.scale")
        return torch.cat([self._checkpoint.read(f"{prefix}.{name}").view(torch.uint8).flatten() for name in names])
