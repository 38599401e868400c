"""Window attention in Triton, for any NVIDIA GPU that Triton knows.

A program takes one row and up to 32 heads, and walks the row's keys in steps that begin at multiples of 16 or 32; keys
outside of its window are zero and masked. Rows share no program: a NaN in one would reach the others through 0 * NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_core.triton_formats import owners, window_rows
from kernel_core.triton_softmax import absorb

_WARPS = 8
_STEPS = {16: 32, 32: 16}
"""Heads of a program -> keys decoded at a time: what fits into registers without spills."""


@triton.jit
def _attend(q, new_rows, ring, slots, row_owners, positions, cu, starts, lowers, sink, rope, out, heads, window,
            ring_rows, turned, scale, HEADS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr,
            BLOCK: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    owner = tl.load(row_owners + t)
    first, start = tl.load(cu + owner).to(tl.int64), tl.load(starts + owner)
    slot = tl.load(slots + owner).to(tl.int64)
    h = group * HEADS + tl.arange(0, HEADS)
    inside = h < heads
    last = tl.load(positions + t)
    begin = last - window + 1
    if BLOCK:
        last = start + tl.load(cu + owner + 1).to(tl.int64) - first - 1
        begin = start - window
    begin = tl.maximum(tl.maximum(tl.load(lowers + owner), begin), 0)
    i = tl.arange(0, HALF)
    row_of_q = (t * heads + h)[:, None] * (2 * HALF)
    mask = inside[:, None]
    q_even = tl.load(q + row_of_q + 2 * i[None, :], mask=mask, other=0.0).to(DOT)
    q_odd = tl.load(q + row_of_q + 2 * i[None, :] + 1, mask=mask, other=0.0).to(DOT)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    even = tl.zeros((HEADS, HALF), tl.float32)
    odd = tl.zeros((HEADS, HALF), tl.float32)
    row_bytes = 2 * HALF + HALF // 16
    for step in range(begin // KEYS, last // KEYS + 1):
        at = step * KEYS + tl.arange(0, KEYS).to(tl.int64)
        known = (at >= begin) & (at <= last)
        new_at = (first + at - start) * row_bytes
        old_at = (slot * ring_rows + at % ring_rows) * row_bytes
        pointers = tl.where(at >= start, new_rows + new_at, ring + old_at)
        k_even, k_odd = window_rows(pointers, known, HALF)
        k_even, k_odd = k_even.to(DOT), k_odd.to(DOT)
        top, total, even, odd = absorb(q_even, q_odd, k_even, k_odd, known, scale, top, total, even, odd)
    a = tl.load(sink + h, mask=inside, other=0.0)
    high = tl.maximum(top, a)
    safe_high = tl.where((high == float("-inf")) | (high == float("inf")), 0.0, high)
    weight = tl.exp(top - safe_high)
    total = total * weight + tl.exp(a - safe_high)
    some = (total > 0) & (a != float("inf"))
    factor = tl.where(some, weight / tl.where(some, total, 1.0), 0.0)[:, None]
    even, odd = even * factor, odd * factor
    pair = i - (HALF - turned)
    cos = tl.load(rope + t * 2 * turned + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(rope + t * 2 * turned + turned + pair, mask=pair >= 0, other=0.0)[None, :]
    tl.store(out + row_of_q + 2 * i[None, :], (even * cos + odd * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(out + row_of_q + 2 * i[None, :] + 1, (odd * cos - even * sin).to(out.dtype.element_ty), mask=mask)


def window_attention(
    q: torch.Tensor,
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    sink: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
    *,
    block: bool = False,
    out: torch.Tensor | None = None,
    dot: Any = tl.bfloat16,
) -> torch.Tensor:
    """As `swa_replay.window_attention` on packed rows; q float32 or bfloat16 [T, H, D], D a power of two from 64 on.

    Arguments are not checked here. Products take `dot` operands (keys are exact in bfloat16, queries and probabilities
    are rounded to it; tl.float32 for the interpreter, whose bfloat16 products are wrong) and sum in float32. Raises
    NotImplementedError for unpacked rows.
    """
    if new_rows.dtype != torch.uint8:
        raise NotImplementedError("triton window_attention: got float32 rows, allowed are packed ones")
    rows, heads, dim = q.shape
    if out is None:
        out = torch.empty_like(q)
    if rows == 0:
        return out
    owner, position = owners(cu_seqlens, start_pos, rows)
    group = 16 if heads <= 16 else 32
    _attend[(rows, triton.cdiv(heads, group))](
        q, new_rows, ring, ring_slot, owner.to(torch.int32), position, cu_seqlens, start_pos, lower, sink, rope, out,
        heads, window, ring.shape[1], rope.shape[1] // 2, scale, HEADS=group, HALF=dim // 2, KEYS=_STEPS[group],
        BLOCK=block, DOT=dot, num_warps=_WARPS,
    )  # fmt: skip
    return out
