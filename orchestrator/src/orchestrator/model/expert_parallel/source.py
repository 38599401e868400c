"""Where a rank gets an expert's weights that no other rank can give it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from orchestrator.model.checkpoint.assemble import NAN_SCALE
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.weights import ModelWeights

_PARTS = ("w1.weight", "w3.weight", "w1.scale", "w3.scale", "w2.weight", "w2.scale")


class ExpertSource(Protocol):
    """Every expert by layer and logical number; draft stages are the layers behind the backbone's."""

    def read(self, layer: int, expert: int) -> torch.Tensor:
        """All bytes of one expert in the order of `ExpertPool`, uint8 [expert_bytes]."""


class LoadedExperts:
    """Experts of a model that is in memory."""

    def __init__(self, weights: ModelWeights) -> None:
        stages = [] if weights.drafter is None else weights.drafter.stages
        self._experts = [layer.experts for layer in (*weights.layers, *stages)]

    def read(self, layer: int, expert: int) -> torch.Tensor:
        e = self._experts[layer]
        return torch.cat([t[expert].flatten() for t in (e.w13, e.s13, e.w2, e.s2)])


class CheckpointExperts:
    """Experts read from a checkpoint folder, one at a time: nothing but that expert's bytes is read."""

    def __init__(self, folder: str | Path) -> None:
        self._checkpoint = Checkpoint(folder)

    @property
    def bytes_read(self) -> int:
        """Of all experts so far."""
        return self._checkpoint.bytes_read

    def read(self, layer: int, expert: int) -> torch.Tensor:
        """Raises `CheckpointError` for a scale that is not a number, as loading the whole model does."""
        backbone = self._checkpoint.config.num_hidden_layers
        block = f"layers.{layer}" if layer < backbone else f"mtp.{layer - backbone}"
        found = []
        for part in _PARTS:
            name = f"{block}.ffn.experts.{expert}.{part}"
            values = self._checkpoint.read(name).view(torch.uint8)
            if part.endswith(".scale") and bool((values == NAN_SCALE).any()):
                raise CheckpointError(
                    f"{self._checkpoint.file_of(name)}: {name}: holds byte {NAN_SCALE} (NaN); the scale is damaged, "
                    "download the file again"
                )
            found.append(values.flatten())
        return torch.cat(found)
