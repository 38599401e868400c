"""Sparse attention in Triton: the readable second implementation, for any NVIDIA GPU that Triton knows.

A program takes one row, up to 32 heads and one chunk of 128 keys: the window first, then the selected rows in their
order. It leaves maximum, sum and weighted keys; a second kernel merges the chunks of a row from the first to the last.
Chunks end at fixed places, so that a row's bits depend on nothing but the row.

Rows are read as even and odd channels: a score is the sum of two products, and turning back the rotary pairs at the
end is a combination of the two halves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_core.triton_formats import main_rows, owners, window_rows
from kernel_core.triton_softmax import absorb

CHUNK = 128
_WARPS = 8
_TILES = {16: 32, 32: 16}
"""Heads of a program -> keys decoded at a time: what fits into registers without spills."""


@triton.jit
def _chunk(q, new_rows, ring, slots, owners, positions, starts, firsts, lowers, pages, table, indices,
           top_out, sum_out, even_out, odd_out, heads, window, window_chunks, ring_rows, rows_per_block, reach,
           selected, scale, HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
           DOT: tl.constexpr):  # fmt: skip
    chunk, t, group = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    chunks = tl.num_programs(0)
    window_bytes = 2 * HALF + HALF // 16
    main_bytes = HALF + HALF // 8
    h = group * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    row_of_q = (t * heads + h)[:, None] * (2 * HALF)
    inside = (h < heads)[:, None]
    q_even = tl.load(q + row_of_q + 2 * i[None, :], mask=inside, other=0.0).to(DOT)
    q_odd = tl.load(q + row_of_q + 2 * i[None, :] + 1, mask=inside, other=0.0).to(DOT)
    owner = tl.load(owners + t)
    position, start = tl.load(positions + t), tl.load(starts + owner)
    lowest = tl.maximum(tl.maximum(tl.load(lowers + owner), position - window + 1), 0)

    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    even = tl.zeros((HEADS, HALF), tl.float32)
    odd = tl.zeros((HEADS, HALF), tl.float32)
    for first in range(0, KEYS, TILE):
        k = chunk * KEYS + first + tl.arange(0, TILE)
        if chunk < window_chunks:
            at = position - window + 1 + k
            known = (at >= lowest) & (at <= position)
            new_at = (tl.load(firsts + owner).to(tl.int64) + at - start) * window_bytes
            slot = tl.load(slots + owner).to(tl.int64)
            old_at = (slot * ring_rows + tl.maximum(at, 0) % ring_rows) * window_bytes
            pointers = tl.where(at >= start, new_rows + new_at, ring + old_at)
            k_even, k_odd = window_rows(pointers, known, HALF)
        else:
            which = k - window_chunks * KEYS
            index = tl.load(indices + t * selected + which, mask=which < selected, other=-1)
            known = index >= 0
            safe = tl.maximum(index, 0)
            block = tl.load(table + owner.to(tl.int64) * reach + safe // rows_per_block, mask=known, other=0)
            row = (block.to(tl.int64) * rows_per_block + safe % rows_per_block) * main_bytes
            k_even, k_odd = main_rows(pages + row, known, HALF)
        k_even, k_odd = k_even.to(DOT), k_odd.to(DOT)
        top, total, even, odd = absorb(q_even, q_odd, k_even, k_odd, known, scale, top, total, even, odd)
    place = (t * heads + h) * chunks + chunk
    tl.store(top_out + place, top, mask=h < heads)
    tl.store(sum_out + place, total, mask=h < heads)
    tl.store(even_out + place[:, None] * HALF + i[None, :], even, mask=inside)
    tl.store(odd_out + place[:, None] * HALF + i[None, :], odd, mask=inside)


@triton.jit
def _merge(tops, sums, evens, odds, sink, rope, out, heads, chunks, turned, HALF: tl.constexpr):
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    place = (t * heads + h) * chunks
    a = tl.load(sink + h)
    top = a
    for c in range(0, chunks):
        top = tl.maximum(top, tl.load(tops + place + c))
    safe_top = tl.where((top == float("-inf")) | (top == float("inf")), 0.0, top)
    total = tl.exp(a - safe_top)
    even = tl.zeros((HALF,), tl.float32)
    odd = tl.zeros((HALF,), tl.float32)
    for c in range(0, chunks):
        weight = tl.exp(tl.load(tops + place + c) - safe_top)
        total += tl.load(sums + place + c) * weight
        even += tl.load(evens + (place + c) * HALF + i) * weight
        odd += tl.load(odds + (place + c) * HALF + i) * weight
    some = (total > 0) & (a != float("inf"))
    total = tl.where(some, total, 1.0)
    even = tl.where(some, even / total, 0.0)
    odd = tl.where(some, odd / total, 0.0)
    pair = i - (HALF - turned)
    cos = tl.load(rope + t * 2 * turned + pair, mask=pair >= 0, other=1.0)
    sin = tl.load(rope + t * 2 * turned + turned + pair, mask=pair >= 0, other=0.0)
    at = (t * heads + h) * 2 * HALF + 2 * i
    tl.store(out + at, (even * cos + odd * sin).to(out.dtype.element_ty))
    tl.store(out + at + 1, (odd * cos - even * sin).to(out.dtype.element_ty))


def sparse_attention(
    q: torch.Tensor,
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    dot: Any = tl.bfloat16,
) -> torch.Tensor:
    """As `mla_fp4.sparse_attention` on packed rows; q float32 or bfloat16 [T, H, D], D a power of two from 64 on.

    Arguments are not checked here. Products take `dot` operands (keys are exact in bfloat16, queries and probabilities
    are rounded to it; tl.float32 for the interpreter, whose bfloat16 products are wrong) and sum in float32. Raises
    NotImplementedError for unpacked rows.
    """
    if new_rows.dtype != torch.uint8:
        raise NotImplementedError("triton sparse_attention: got float32 rows, allowed are packed ones")
    rows, heads, dim = q.shape
    if out is None:
        out = torch.empty_like(q)
    if rows == 0:
        return out
    owner, position = owners(cu_seqlens, start_pos, rows)
    window_chunks = -(-window // CHUNK)
    chunks = window_chunks + -(-indices.shape[1] // CHUNK)
    group = 16 if heads <= 16 else 32
    tops, sums = (torch.empty(rows, heads, chunks, dtype=torch.float32, device=q.device) for _ in range(2))
    evens, odds = (torch.empty(rows, heads, chunks, dim // 2, dtype=torch.float32, device=q.device) for _ in range(2))
    _chunk[(chunks, rows, triton.cdiv(heads, group))](
        q, new_rows, ring, ring_slot, owner.to(torch.int32), position, start_pos, cu_seqlens, lower, pages, block_table,
        indices, tops, sums, evens, odds, heads, window, window_chunks, ring.shape[1], rows_per_block,
        block_table.shape[1], indices.shape[1], scale, HEADS=group, HALF=dim // 2, TILE=_TILES[group], KEYS=CHUNK,
        DOT=dot, num_warps=_WARPS,
    )  # fmt: skip
    _merge[(rows, heads)](tops, sums, evens, odds, sink, rope, out, heads, chunks, rope.shape[1] // 2, HALF=dim // 2)
    return out
