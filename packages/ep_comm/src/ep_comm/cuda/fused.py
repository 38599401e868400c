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
    met: bool


@dataclass(frozen=True)
class FusedSizes:
    """Of a group's buffers: ranks, the most tokens of a rank, hidden channels, slots of a token."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value > 0, name, value, "1 or more")
        require(self.hidden % 16 == 0, "hidden", self.hidden, "a multiple of 16")

    def offsets(self) -> dict[str, int]:
        """Where each buffer begins in a rank's memory, and `bytes` of all."""
        sizes = {
            "x": self.tokens * self.hidden * 2,
            "weights": self.tokens * self.top_k * 4,
            "slots": self.ranks * self.tokens * self.top_k * 4,
            "parts": self.tokens * (self.top_k + 1) * self.hidden * 4,
            "flags": 2 * self.ranks * 4,
        }
        at, end = {}, 0
        for name, size in sizes.items():
            at[name] = end
            end += -(-size // _ALIGN) * _ALIGN
        return at | {"bytes": end}


class FusedBuffers:
    """One rank's view of all ranks' buffers; entry r of a list is rank r's.

    x: bfloat16 [tokens, hidden] and weights: float32 [tokens, top_k], of the rank's own tokens.
    slots: int32 [ranks, tokens, top_k], by peers: which of this rank's experts each slot of theirs wants, or -1.
    parts: float32 [tokens * (top_k + 1), hidden], by peers: what their experts gave.
    flags: int32 [2 * ranks] of the experts' kernel.
    `ep_comm.cuda.FusedExchange.publish` fills them, and has all ranks meet; `tables` is what the kernel takes beside
    `mega_moe.cuda.route.permute(buffers.mine, experts)`.
    """

    def __init__(self, memories: list[torch.Tensor], rank: int, sizes: FusedSizes) -> None:
        at = sizes.offsets()
        self.rank, self.sizes = rank, sizes

        def parts(name: str, dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
            count = torch.Size(shape).numel() * dtype.itemsize
            return [m[at[name] : at[name] + count].view(dtype).view(*shape) for m in memories]

        tokens, top_k = sizes.tokens, sizes.top_k
        self.x = parts("x", torch.bfloat16, tokens, sizes.hidden)
        self.weights = parts("weights", torch.float32, tokens, top_k)
        self.slots = parts("slots", torch.int32, sizes.ranks, tokens, top_k)
        self.parts = parts("parts", torch.float32, tokens * (top_k + 1), sizes.hidden)
        self.flags = parts("flags", torch.int32, 2 * sizes.ranks)

    @property
    def mine(self) -> torch.Tensor:
        """int32 [ranks * tokens, top_k], all tokens' slots that want this rank's experts."""
        return self.slots[self.rank].view(-1, self.sizes.top_k)

    def tables(self) -> FusedTables:
        s = self.sizes
        rows, everybody = s.tokens * s.top_k, s.ranks * s.tokens
        return FusedTables(self.rank, self.x, self.weights, self.parts, self.flags, rows, everybody, met=True)


def virtual_buffers(sizes: FusedSizes, device: torch.device) -> list[FusedBuffers]:
    """Of all ranks of one process."""
    size = sizes.offsets()["bytes"]
    memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(sizes.ranks)]
    return [FusedBuffers(memories, r, sizes) for r in range(sizes.ranks)]


def peer_buffers(symmetric: Symmetric, rank: int, sizes: FusedSizes) -> FusedBuffers:
    """This process's, over memory of `sizes.offsets()["bytes"]` bytes."""
    require(len(symmetric.tensors) == sizes.ranks, "symmetric", f"{len(symmetric.tensors)} ranks", str(sizes.ranks))
    need = sizes.offsets()["bytes"]
    require(symmetric.size >= need, "symmetric", f"{symmetric.size} bytes", f"{need} or more")
    return FusedBuffers(symmetric.tensors, rank, sizes)
