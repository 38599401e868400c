"""Experts with hidden channels that the kernels have no tiles for: zeros beside them up to the next width."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega_moe.cuda import layout
from mega_moe.weights import SharedExpert

MULTIPLE = 256  # hidden channels of the kernels' tiles
_ONE = 127  # UE8M0
Four = layout.Four


@dataclass(frozen=True)
class WidenedExperts(layout.PackedExperts):
    """`inter` counts zeros too; `stored`: hidden channels of the weights as they came, the first ones."""

    stored: int = 0


def pack_experts(
    w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, shared: SharedExpert | None = None
) -> layout.PackedExperts:
    """`mega_moe.cuda.layout.pack_experts` for any number of hidden channels that is a multiple of 32."""
    stored = 2 * w2.shape[2]
    inter = wider(stored)
    if inter == stored:
        return layout.pack_experts(w13, s13, w2, s2, shared)
    same = None if shared is None else SharedExpert(*widen(shared.w13, shared.s13, shared.w2, shared.s2, inter))
    packed = layout.pack_experts(*widen(w13, s13, w2, s2, inter), same)
    return WidenedExperts(**vars(packed), stored=stored)


def unpack_experts(
    packed: layout.PackedExperts,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Four | None]:
    """The exact inverse of `pack_experts`."""
    w13, s13, w2, s2, shared = layout.unpack_experts(packed)
    if not isinstance(packed, WidenedExperts):
        return w13, s13, w2, s2, shared
    return *narrow(w13, s13, w2, s2, packed.stored), None if shared is None else narrow(*shared, packed.stored)


def wider(inter: int) -> int:
    """The next width of hidden rows that the kernels have tiles for."""
    return -(-inter // MULTIPLE) * MULTIPLE


def widen(w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, inter: int) -> Four:
    """Weights of one expert or of several, [..., R, K] and scales, with hidden channels of zeros up to `inter`.

    In the kernels' order of sums they change no bit: a hidden channel of zero adds zero, behind all others.
    """
    rows = w13.shape[-2] // 2

    def gated(t: torch.Tensor, fill: int) -> torch.Tensor:
        both = t.view(torch.uint8).unflatten(-2, (2, -1))
        more = both.new_full((*both.shape[:-2], both.shape[-2] * (inter - rows) // rows, both.shape[-1]), fill)
        return torch.cat([both, more], dim=-2).flatten(-3, -2).view(t.dtype)

    def across(t: torch.Tensor, fill: int) -> torch.Tensor:
        plain = t.view(torch.uint8)
        more = plain.new_full((*plain.shape[:-1], plain.shape[-1] * (inter - rows) // rows), fill)
        return torch.cat([plain, more], dim=-1).view(t.dtype)

    return gated(w13, 0), gated(s13, _ONE), across(w2, 0), across(s2, _ONE)


def narrow(w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, inter: int) -> Four:
    """The inverse of `widen`."""
    rows = w13.shape[-2] // 2

    def gated(t: torch.Tensor) -> torch.Tensor:
        both = t.view(torch.uint8).unflatten(-2, (2, -1))
        return both[..., : both.shape[-2] * inter // rows, :].flatten(-3, -2).view(t.dtype)

    def across(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.uint8)[..., : t.shape[-1] * inter // rows].contiguous().view(t.dtype)

    return gated(w13), gated(s13), across(w2), across(s2)
