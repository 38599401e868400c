"""What the draft stages read of a forward pass: the streams that enter a few layers, averaged."""

from __future__ import annotations

import torch

from orchestrator.model.batch import Rows
from orchestrator.model.config import ModelConfig


class Taps:
    """Filled by one `Transformer.forward` (docs/model.md, Draft stages).

    Attributes:
        rows: the rows that the decoder computed in that step; None before it ran.
        slots: int32 [B], the slot of each request of the step.
        highest: no row stands at a position above it.
        values: float32 [T, taps · hidden], one row for each of `rows`.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.layers = frozenset(config.dspark_target_layer_ids)
        self._width = len(config.dspark_target_layer_ids) * config.hidden_size
        self._parts: list[torch.Tensor] = []
        self.rows: Rows | None = None
        self.slots = torch.empty(0, dtype=torch.int32)
        self.highest = 0

    def take(self, x: torch.Tensor) -> None:
        """Note the streams X float32 [T, n, hidden] that enter a tapped layer."""
        total = x[:, 0]
        for stream in range(1, x.shape[1]):  # element by element, so that a row's bits do not depend on its batch
            total = total + x[:, stream]
        self._parts.append(total * (1.0 / x.shape[1]))

    def close(self, rows: Rows, slots: torch.Tensor, highest: int) -> None:
        self.rows, self.slots, self.highest = rows, slots, highest

    @property
    def values(self) -> torch.Tensor:
        return torch.cat(self._parts, dim=1) if self._parts else torch.empty(0, self._width)
