"""Dense products on a GPU: PyTorch's bfloat16 product on a copy of the weight, sums in float32.

Every stored value is a bfloat16 value, so the copy is exact. `fixed` keeps the error of a float32 product: an
activation becomes three bfloat16 numbers that add up to it, and rows go in blocks of one size, filled up with zeros, so
that the library always runs the same product and a row's bits do not depend on the other rows. `library` rounds
activations to bfloat16 once and takes all rows together. How both compare with the FP8 kernel of `mega_moe.linear`:
docs/kernels/mega_moe.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

_BLOCK = 64  # rows of a product in `fixed`
_TERMS = 3


def product(weight: torch.Tensor, mode: Literal["fixed", "library"]) -> Callable[[torch.Tensor], torch.Tensor]:
    """x float32 [T, in] -> float32 [T, out], `weight` bfloat16 [out, in]."""
    across = weight.t()
    if mode == "library":
        return lambda x: torch.mm(x.bfloat16(), across, out_dtype=torch.float32)
    return lambda x: _in_blocks(x, lambda rows: torch.mm(rows, across, out_dtype=torch.float32))


def grouped_product(
    weight: torch.Tensor, groups: int, mode: Literal["fixed", "library"]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x float32 [T, groups, in] -> float32 [T, groups, out / groups]; `weight` bfloat16 [out, in], by group."""
    across = weight.view(groups, -1, weight.shape[1]).transpose(1, 2)

    def batched(rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows.transpose(0, 1), across, out_dtype=torch.float32).transpose(0, 1)

    if mode == "library":
        return lambda x: batched(x.bfloat16()).contiguous()
    return lambda x: _in_blocks(x, batched)


def _in_blocks(x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The rows of x, `_BLOCK` at a time, as three terms below each other.

    Only products go block by block. What is done element by element is done for all blocks at once: a row's bits are
    the same either way, and a step of many rows has a quarter of the kernels.
    """
    count = x.shape[0]
    if count == 0:
        return run(x.bfloat16())
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -count % _BLOCK))
    terms = _terms(padded.view(-1, _BLOCK, *x.shape[1:]))
    parts = [run(block.flatten(0, 1)) for block in terms]
    sums = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
    high, middle, low = sums.unflatten(1, (_TERMS, _BLOCK)).unbind(1)
    return (low + middle + high).flatten(0, 1)[:count].contiguous()


def _terms(x: torch.Tensor) -> torch.Tensor:
    """Blocks [B, T, ...] as bfloat16 [B, 3, T, ...]: what x rounds to, what the rest rounds to, the rest of that."""
    parts, rest = [], x
    for _ in range(_TERMS):
        term = rest.bfloat16()
        parts.append(term)
        # An infinite or too large value has no rest: inf - inf would make a NaN of it.
        rest = torch.where(term.isinf(), 0.0, rest - term.float())
    return torch.stack(parts, dim=1)
