"""Experts spread over ranks that reach each other's memory: dispatch and combine inside the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOST_RANKS = 8


@dataclass(frozen=True)
class Ranks:
    """The buffers of all ranks as one of them sees them; `mega_moe.cuda.experts.experts` takes it as `ranks`.

    x: [tokens of the rank, d], one dtype for all; weights: float32 [tokens, k]; parts: float32 [tokens * (k + 1), d],
    where any rank stores what its experts give; flags: int32 [2 * ranks], zero before the first launch.
    rows_of_rank: `rows` of the permutation hold rank * rows_of_rank + token * k + slot; the most tokens * k of a rank.
    everybody: tokens of all ranks, an upper bound for workspaces.
    most: tokens of the rank that has most, where it is known: tiles are made for it. No bit depends on it.
    met: all ranks have met on the stream since the launch before, with x and weights in place; else they meet inside
        the kernel.
    """

    rank: int
    x: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]
    flags: Sequence[torch.Tensor]
    rows_of_rank: int
    everybody: int
    met: bool = False
    most: int = 0

    def __post_init__(self) -> None:
        world = len(self.x)
        if not 1 < world <= MOST_RANKS or {len(self.weights), len(self.parts), len(self.flags)} != {world}:
            raise ValueError(f"ranks: got {world}, allowed are 2 to {MOST_RANKS}, with a buffer of each kind")
        if not 0 <= self.rank < world:
            raise ValueError(f"rank: got {self.rank}, allowed is 0 to {world - 1}")

    def table(self) -> torch.Tensor:
        """Addresses on the host: [x, weights, parts, flags][rank]."""
        kinds = (self.x, self.weights, self.parts, self.flags)
        return torch.tensor([[t.data_ptr() for t in kind] for kind in kinds], dtype=torch.int64)


def number_rows(ids: Sequence[torch.Tensor], rank: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Offsets, rows and rows_of_rank of one rank, from all ranks' ids (int32 [tokens, k], experts of all ranks).

    Rank r has experts r * experts to (r + 1) * experts - 1. In PyTorch's operators, without waiting for the device.
    """
    slots = ids[0].shape[1]
    width = max(1, max(part.shape[0] for part in ids) * slots)
    numbers = [torch.arange(part.numel(), device=part.device) + r * width for r, part in enumerate(ids)]
    mine = torch.cat([part.flatten() for part in ids]).long() - rank * experts
    key = torch.where((mine >= 0) & (mine < experts), mine, experts)
    order = key.argsort(stable=True)
    bounds = torch.arange(experts + 1, device=key.device)
    offsets = torch.searchsorted(key[order], bounds).int()
    return offsets, torch.cat(numbers)[order].int(), width
