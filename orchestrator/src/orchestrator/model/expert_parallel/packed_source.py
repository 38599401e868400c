"""Experts in the form that a `PackedPool` holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mega_moe.cuda import widen
from orchestrator.model.expert_parallel.pool import ExpertShapes
from orchestrator.model.expert_parallel.source import ExpertSource
from orchestrator.model.moe import Moe


class PackedSource:
    """Packs what another source reads, on the device that it is for."""

    def __init__(self, source: ExpertSource, shapes: ExpertShapes, device: torch.device) -> None:
        self._source, self._shapes, self._device = source, shapes, device

    def read(self, layer: int, expert: int) -> torch.Tensor:
        """Raises ValueError for scales that the packed form has no place for."""
        stored = self._shapes.split(self._source.read(layer, expert).to(self._device))
        w13, s13, w2, s2 = (part[None] for part in stored)
        packed = widen.pack_experts(w13, s13, w2, s2)
        return torch.cat([packed.w13[0], packed.w2[0]])


class LoadedPacked:
    """Of layers whose experts are packed and in memory."""

    def __init__(self, layers: Sequence[Moe]) -> None:
        self._layers = list(layers)

    def read(self, layer: int, expert: int) -> torch.Tensor:
        packed = self._layers[layer].packed
        assert packed is not None
        return torch.cat([packed.w13[expert], packed.w2[expert]])
