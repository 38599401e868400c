"""Memory for experts fused with dispatch and combine: one kernel reads peers' tokens and stores results there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ep_comm.cuda.peers import Symmetric
from kernel_core.check import require

_ALIGN = 256


class FusedTables(NamedTuple):
    """The fields of `mega_moe.cuda.ranks.Ranks`, by name."""

    rank: int
    x: list[torch.Tensor]
    weights: list[torch.Tensor]
    parts: list[torch.Tensor]
    flags: list[torch.Tensor]
    rows_of_rank: int
    everybody: int


@dataclass(frozen=True)
class _Sizes:
    ranks: int
    tokens: int
    hidden: int
    top_k: int
    dtype: torch.dtype

    def offsets(self) -> dict[str, int]:
        sizes = {
            "x": self.tokens * self.hidden * self.dtype.itemsize,
            "ids": self.tokens * self.top_k * 4,
            "weights": self.tokens * self.top_k * 4,
            "parts": self.tokens * (self.top_k + 1) * self.hidden * 4,
            "flags": 2 * self.ranks * 4,
        }
        at, end = {}, 0
        for name, size in sizes.items():
            at[name] = end
            end += -(-size // _ALIGN) * _ALIGN
        return at | {"bytes": end}


class FusedBuffers:
    """One rank's view of all ranks' buffers.

    x: [tokens, hidden], ids: int32 [tokens, top_k], weights: float32 [tokens, top_k] a rank. The caller fills its own,
    with ids -1 for unused tokens; a `barrier` then lets all read. `mega_moe.cuda.ranks.number_rows(buffers.ids, rank,
    experts)` gives offsets, rows and rows_of_rank; `tables` what the kernel takes.
    """

    def __init__(self, memories: list[torch.Tensor], rank: int, sizes: _Sizes) -> None:
        at = sizes.offsets()
        self.rank, self._sizes = rank, sizes

        def parts(name: str, dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
            count = torch.Size(shape).numel() * dtype.itemsize
            return [m[at[name] : at[name] + count].view(dtype).view(*shape) for m in memories]

        tokens, top_k = sizes.tokens, sizes.top_k
        self.x = parts("x", sizes.dtype, tokens, sizes.hidden)
        self.ids = parts("ids", torch.int32, tokens, top_k)
        self.weights = parts("weights", torch.float32, tokens, top_k)
        self.parts = parts("parts", torch.float32, tokens * (top_k + 1), sizes.hidden)
        self.flags = parts("flags", torch.int32, 2 * sizes.ranks)

    def tables(self, rows_of_rank: int) -> FusedTables:
        everybody = self._sizes.ranks * self._sizes.tokens
        return FusedTables(self.rank, self.x, self.weights, self.parts, self.flags, rows_of_rank, everybody)


def virtual_buffers(
    ranks: int, tokens: int, hidden: int, top_k: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[FusedBuffers]:
    """Of all ranks of one process."""
    sizes = _checked(ranks, tokens, hidden, top_k, dtype)
    size = sizes.offsets()["bytes"]
    memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
    return [FusedBuffers(memories, r, sizes) for r in range(ranks)]


def peer_buffers(
    symmetric: Symmetric, rank: int, tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16
) -> FusedBuffers:
    """This process's, over memory of `fused_bytes` bytes."""
    sizes = _checked(len(symmetric.tensors), tokens, hidden, top_k, dtype)
    need = sizes.offsets()["bytes"]
    require(symmetric.size >= need, "symmetric", f"{symmetric.size} bytes", f"{need} or more")
    return FusedBuffers(symmetric.tensors, rank, sizes)


def fused_bytes(ranks: int, tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> int:
    return _checked(ranks, tokens, hidden, top_k, dtype).offsets()["bytes"]


def _checked(ranks: int, tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> _Sizes:
    for name, value in (("ranks", ranks), ("tokens", tokens), ("hidden", hidden), ("top_k", top_k)):
        require(value > 0, name, value, "1 or more")
    require(hidden % 16 == 0, "hidden", hidden, "a multiple of 16")
    require(dtype in (torch.bfloat16, torch.float32), "dtype", dtype, "bfloat16 or float32")
    return _Sizes(ranks, tokens, hidden, top_k, dtype)
