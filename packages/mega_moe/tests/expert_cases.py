"""Routed rows for the tests of the expert kernels, on any device."""

from __future__ import annotations

import torch


def sort_rows(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by expert, stable: prefix sums and position to token * slots + slot, -1 behind the last."""
    flat = ids.flatten().long()
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = key.argsort(stable=True).int()
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    order[int(offsets[-1]) :] = -1
    return offsets, order


def random_ids(tokens: int, slots: int, experts: int) -> torch.Tensor:
    """int32 [tokens, slots], distinct in a row."""
    picks = [torch.randperm(experts)[:slots] for _ in range(tokens)]
    return torch.stack(picks).int() if picks else torch.empty(0, slots, dtype=torch.int32)


def quantized(rows: torch.Tensor) -> torch.Tensor:
    """E4M3 with a float32 scale for 128 channels of a row, as numbers."""
    groups = rows.unflatten(-1, (-1, 128))
    top = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, torch.full_like(top, 448) / top, 0.0)
    return ((groups * inverse).to(torch.float8_e4m3fn).float() * (top / 448)).flatten(-2)
