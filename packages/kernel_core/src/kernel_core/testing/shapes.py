"""Sizes and batches at which kernels break: nothing, one, a lane too many, requests without rows, long chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch


def edge_sizes(maximum: int, *, step: int = 1) -> list[int]:
    """Ascending multiples of `step` from 0 to `maximum`: small ones, neighbours of powers of two, the largest."""
    around = {power + d for power in (4, 8, 16, 32, 64, 128, 256, 512, 1024) for d in (-1, 0, 1)}
    wanted = {0, 1, 2, 3, *around, maximum // step - 1, maximum // step}
    return sorted({size * step for size in wanted if 0 <= size * step <= maximum})


@dataclass(frozen=True)
class RaggedBatch:
    """Requests flattened to rows: request b owns rows `cu_seqlens[b] .. cu_seqlens[b+1]` from `start_pos[b]` on."""

    cu_seqlens: torch.Tensor  # int32[B + 1]
    start_pos: torch.Tensor  # int64[B]

    @staticmethod
    def of(lengths: list[int], starts: list[int]) -> RaggedBatch:
        """From rows and first position of each request."""
        total = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return RaggedBatch(total, torch.tensor(starts, dtype=torch.int64))

    @property
    def requests(self) -> int:
        return len(self.start_pos)

    @property
    def rows(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def positions(self) -> torch.Tensor:
        """int64[T]: the position of each row in its request."""
        parts = [torch.arange(n) + s for n, s in zip(self.lengths, self.start_pos.tolist(), strict=True)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def request_of_row(self) -> torch.Tensor:
        """int64[T]: the request that owns each row."""
        return torch.repeat_interleave(torch.arange(self.requests), self.cu_seqlens.diff().long())


def ragged_batches(*, window: int = 128, max_rows: int = 300, seed: int = 0) -> Iterator[RaggedBatch]:
    """Batches that matter around a window: decode, prefill, mixed, empty requests, chunks longer than the window."""
    long = min(max_rows, window + window // 2 + 3)
    yield RaggedBatch.of([1], [0])
    yield RaggedBatch.of([0], [5])
    yield RaggedBatch.of([long], [0])
    yield RaggedBatch.of([1, 1, 1, 1], [0, 1, window - 1, 3 * window + 1])  # decode at the edges of the window
    yield RaggedBatch.of([0, 3, 0, 1, 0], [7, 2, 0, window, 1])
    yield RaggedBatch.of([5, long, 1], [window - 2, window // 2 + 1, 10 * window])
    rng = random.Random(seed)
    for _ in range(2):
        lengths = [rng.choice([0, 1, 1, 2, 6, rng.randrange(1, max(2, max_rows // 4))]) for _ in range(5)]
        yield RaggedBatch.of(lengths, [rng.randrange(4 * window) for _ in lengths])
