"""Index scores in Triton: MXFP4 keys from their pages, queries through the same format, one product a head.

A program takes one row and 64 keys. A code byte of a key holds an even and an odd channel, so a score is the sum of two
products; scales of keys and queries are powers of two and are multiplied in before them, which is exact in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_core.triton_formats import e2m1, owners, ue8m0

KEYS = 64


@triton.jit
def _rounded(x):
    """The nearest E2M1 value of x float32, ties to the even code: the step doubles at 2 and 4."""
    a = tl.minimum(tl.abs(x), 6.0)
    step = tl.where(a < 2, 0.5, tl.where(a < 4, 1.0, 2.0))
    scaled = a / step
    whole = tl.floor(scaled)
    rest = scaled - whole
    odd = (whole.to(tl.int32) & 1) == 1
    up = (rest > 0.5) | ((rest == 0.5) & odd)
    value = (whole + up.to(tl.float32)) * step
    return tl.where(x < 0, -value, value)


@triton.jit
def _through_mxfp4(even, odd, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Even and odd channels [heads, D/2] as an index row gives them back: a scale for 32 channels, 16 of each."""
    peak = tl.maximum(tl.abs(even), tl.abs(odd))
    amax = tl.max(tl.reshape(peak, (HEADS, HALF // 16, 16)), 2)
    amax = tl.maximum(amax, 7.052966104933725e-38)  # 6 * 2^-126
    bits = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (HEADS, HALF // 16, 16)), (HEADS, HALF))
    inverse = tl.reshape(tl.broadcast_to(inverse[:, :, None], (HEADS, HALF // 16, 16)), (HEADS, HALF))
    return _rounded(even * inverse) * scale, _rounded(odd * inverse) * scale


@triton.jit
def _scores(q, weights, pages, table, owners, visible, out, heads, rows_per_block, reach, width,
            HEADS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = part * KEYS + tl.arange(0, KEYS)
    count = tl.load(visible + t)
    if part * KEYS >= count:
        tl.store(out + t * width + k, tl.full((KEYS,), float("-inf"), tl.float32), mask=k < width)
        return
    h, i = tl.arange(0, HEADS), tl.arange(0, HALF)
    known = k < count
    owner = tl.load(owners + t).to(tl.int64)
    block = tl.load(table + owner * reach + k // rows_per_block, mask=known, other=0).to(tl.int64)
    page = block * rows_per_block * (HALF + HALF // 16)
    row = k % rows_per_block
    byte = tl.load(pages + (page + row * HALF)[:, None] + i[None, :], mask=known[:, None], other=0).to(tl.int32)
    at = page + rows_per_block * HALF + row * (HALF // 16)
    scale = ue8m0(tl.load(pages + at[:, None] + (i // 16)[None, :], mask=known[:, None], other=0).to(tl.int32))
    k_even = tl.where(known[:, None], e2m1(byte & 15) * scale, 0.0).to(DOT)
    k_odd = tl.where(known[:, None], e2m1(byte >> 4) * scale, 0.0).to(DOT)
    row_of_q = (t * heads + h)[:, None] * (2 * HALF)
    inside = (h < heads)[:, None]
    even = tl.load(q + row_of_q + 2 * i[None, :], mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(q + row_of_q + 2 * i[None, :] + 1, mask=inside, other=0.0).to(tl.float32)
    even, odd = _through_mxfp4(even, odd, HEADS, HALF)
    products = tl.dot(k_even, tl.trans(even.to(DOT)), input_precision="ieee")
    products += tl.dot(k_odd, tl.trans(odd.to(DOT)), input_precision="ieee")
    w = tl.load(weights + t * heads + h, mask=h < heads, other=0.0)
    score = tl.sum(tl.maximum(products, 0.0) * w[None, :], 1)
    tl.store(out + t * width + k, tl.where(known, score, float("-inf")), mask=k < width)


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
    *,
    width: int | None = None,
    dot: Any = tl.bfloat16,
) -> torch.Tensor:
    """As `mla_fp4.index_scores` on packed pages: float32 [T, width], -inf from a row's visible count on.

    `width` None reads the largest visible count back from the device. D is a power of two from 32 on. Arguments are not
    checked here. Raises NotImplementedError for unpacked pages.
    """
    if pages.dtype != torch.uint8:
        raise NotImplementedError("triton index_scores: got float32 pages, allowed are packed ones")
    rows, heads, dim = q.shape
    if width is None:
        width = int(visible.max()) if rows else 0
    out = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    if rows == 0 or width == 0:
        return out
    owner, _ = owners(cu_seqlens, torch.zeros_like(cu_seqlens[1:], dtype=torch.int64), rows)
    _scores[(rows, triton.cdiv(width, KEYS))](
        q, head_weights, pages, block_table, owner.to(torch.int32), visible, out, heads, rows_per_block,
        block_table.shape[1], width, HEADS=max(16, triton.next_power_of_2(heads)), HALF=dim // 2, KEYS=KEYS, DOT=dot,
    )  # fmt: skip
    return out
