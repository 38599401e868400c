"""Attention over the window and the selected compressed rows, with one softmax."""

from __future__ import annotations

from typing import Any

import torch

import mla_fp4.reference.attention as reference
from kernel_core import check, elsewhere, register_op, use_reference
from kernel_core.window_arguments import check_window
from mla_fp4.native import native

_I32 = torch.int32


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
) -> torch.Tensor:
    """One softmax over window rows and selected compressed rows, all heads sharing one latent key.

    Formula: docs/model.md, Attention.

    The row at position p of request b sees the window keys at max(0, lower[b], p - window + 1) to p (below
    start_pos[b] from the request's ring, the rest from `new_rows`; store these afterwards), and the compressed rows
    its `indices` name. A token seen on both ways counts twice. Scores are scale · q·k; `sink` joins the denominator
    only; a key is its own value. The last rope_dim channels of the result are turned back by the row's angles. A row
    without keys gives zeros. Bytes that no key names have no influence, NaN included.

    A row's result depends on nothing but its own keys: not on other rows, the cut into steps, or the threads.

    On an NVIDIA GPU the kernels take packed rows of 512 channels, 64 of them rotated, and a window of up to 128. They
    round q and the result to bfloat16, for any number of heads. Other shapes run in PyTorch's operators, in float32.
    Slots, offsets, indices and blocks are not checked there, as that would wait for the device: wrong ones read wrong
    rows. Positions have to stay below 2^31 there.

    Args:
        q: float32 [T, H, D], rotated; D a multiple of 32. On a GPU bfloat16 too.
        new_rows: uint8 [T, D + D/32] (E4M3 codes, then UE8M0 scales), or float32 [T, D]: this step's rows.
        ring: [S, R, row] of the same kind, R >= window; row p mod R of a slot holds position p.
        ring_slot: int32 [B], each request's slot.
        cu_seqlens: int32 [B + 1]; request b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        start_pos: int64 [B], position of a request's first row.
        lower: int64 [B], window positions below are not seen (the start of a replay, else 0).
        window: positions that a row sees, itself included.
        pages: uint8 [NB, rows_per_block, D/2 + D/16] (E2M1 codes, then E4M3 scales), or float32
            [NB, rows_per_block, D]; packed exactly when the window rows are.
        rows_per_block: compressed rows in a page.
        block_table: int32 [B, M]: compressed position j of request b is row j mod rows_per_block of page
            block_table[b, j // rows_per_block]. Only entries that an index names are read.
        indices: int32 [T, K], compressed positions; -1, anywhere, selects nothing. Their order is the order of sums.
        sink: float32 [H], logits that are not scaled; infinite ones are defined (-inf adds nothing, +inf gives zeros).
        rope: float32 [T, rope_dim], cosines, then sines.
        scale: factor of the scores, 1/sqrt(D) for the model.
        out: [T, H, D] of q's dtype to write to; must not overlap q.

    Returns:
        [T, H, D] of q's dtype.

    Raises:
        ValueError: a dtype, shape, slot, offset, index or block that does not fit; nothing is written then.
        NotImplementedError: the tensors' device has no implementation.
    """
    sizes = check_window(q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, out)
    rows, heads, dim, batch, slots, ring_size, rope_dim, packed = sizes
    if rows_per_block < 1:
        check.require(False, "rows_per_block", rows_per_block, "1 or more")
    if pages.dim() != 3 or not (block_table.dim() == indices.dim() == 2):
        check.tensor("pages", pages, dtype=ring.dtype, shape=(None, rows_per_block, None))
        check.tensor("block_table", block_table, dtype=_I32, shape=(None, None))
        check.tensor("indices", indices, dtype=_I32, shape=(rows, None))
    blocks, reach, selected = pages.shape[0], block_table.shape[1], indices.shape[1]
    check.exactly(
        ("pages", pages, ring.dtype, (blocks, rows_per_block, dim // 2 + dim // 16 if packed else dim)),
        ("block_table", block_table, _I32, (batch, reach)),
        ("indices", indices, _I32, (rows, selected)),
    )
    arguments: tuple[Any, ...] = (q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window)
    arguments = (*arguments, pages, rows_per_block, block_table, indices, sink, rope, scale)
    if use_reference():
        result = reference.sparse_attention(*arguments)
        return result if out is None else out.copy_(result)
    if path := elsewhere("mla_fp4.sparse_attention", q, kernels=True, triton=True):
        return _elsewhere(path, arguments, out)
    if out is None:
        out = torch.empty(rows, heads, dim)
    native.sparse_attention(
        q.data_ptr(),
        new_rows.data_ptr(),
        ring.data_ptr(),
        ring_slot.data_ptr(),
        cu_seqlens.data_ptr(),
        start_pos.data_ptr(),
        lower.data_ptr(),
        pages.data_ptr(),
        block_table.data_ptr(),
        indices.data_ptr(),
        sink.data_ptr(),
        rope.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        dim,
        batch,
        slots,
        ring_size,
        window,
        blocks,
        rows_per_block,
        reach,
        selected,
        rope_dim,
        scale,
        packed,
    )
    return out


def _elsewhere(path: str, arguments: tuple[Any, ...], out: torch.Tensor | None) -> torch.Tensor:
    q, _, ring, _, _, _, _, window, _, _, _, indices, _, rope, _ = arguments
    if path == "triton":
        from mla_fp4 import triton_attention

        return triton_attention.sparse_attention(*arguments, out=out)
    from mla_fp4.cuda import attention as cuda

    if path == "cuda" and cuda.fits(q, ring, window, indices.shape[1], rope):
        return cuda.sparse_attention(*arguments, out=out)
    result = reference.sparse_attention(q.float(), *arguments[1:])
    return result.to(q.dtype) if out is None else out.copy_(result)


register_op(
    "mla_fp4",
    "sparse_attention(Tensor q, Tensor new_rows, Tensor ring, Tensor ring_slot, Tensor cu_seqlens, Tensor start_pos, "
    "Tensor lower, int window, Tensor pages, int rows_per_block, Tensor block_table, Tensor indices, Tensor sink, "
    "Tensor rope, float scale) -> Tensor",
    sparse_attention,
    lambda q, *_: torch.empty_like(q),
)
