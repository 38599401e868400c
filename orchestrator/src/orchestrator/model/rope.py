"""Rotary position tables, with YaRN for the layers that read compressed rows."""

from __future__ import annotations

import math

import torch


def inverse_frequencies(
    dim: int,
    base: float,
    *,
    factor: float = 1.0,
    beta_fast: float = 32,
    beta_slow: float = 1,
    original_max_position: int = 0,
) -> torch.Tensor:
    """Rotation per position of each of the `dim` / 2 pairs, float32 (computed in float64, rounded once).

    With `original_max_position` > 0 the slow pairs are divided by `factor` (YaRN), blended over a linear ramp
    between the pairs that turn `beta_fast` and `beta_slow` times in the original context.
    """
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    freq = base ** (-pair / dim)
    if original_max_position > 0 and factor != 1.0:

        def pair_that_turns(times: float) -> float:
            return dim * math.log(original_max_position / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_that_turns(beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(beta_slow)), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freq = freq / factor * ramp + freq * (1 - ramp)
    return freq.to(torch.float32)


class RopeTable:
    """Rows of cos then sin for any position, grown in whole chunks so that a row never depends on when it was made."""

    _CHUNK = 4096

    def __init__(self, frequencies: torch.Tensor, device: torch.device | None = None) -> None:
        """`frequencies` on the CPU, where all rows are computed; the table lies on `device`."""
        self.frequencies = frequencies
        self._table = torch.empty(0, 2 * frequencies.numel(), device=device)

    def rows(self, positions: torch.Tensor, highest: int) -> torch.Tensor:
        """float32 [T, dim] for int64 `positions` [T], none above `highest`."""
        self.reserve(highest)
        return self._table.index_select(0, positions)

    def reserve(self, highest: int) -> None:
        """Make the rows up to `highest`. The table moves when it grows; one that was large enough stays where it is."""
        while self._table.shape[0] <= highest:
            self._grow()

    def _grow(self) -> None:
        start = self._table.shape[0]
        size = max(self._CHUNK, start)  # doubles
        position = torch.arange(start, start + size, dtype=torch.float32)
        angle = (position[:, None] * self.frequencies[None, :]).double()  # the product is rounded to float32 first
        rows = torch.cat([angle.cos(), angle.sin()], dim=1).float()
        self._table = torch.cat([self._table, rows.to(self._table.device)])
