"""Sparse attention by the CUDA C++ kernels."""

from __future__ import annotations

import torch

from kernel_core.cuda import aligned, cuda_module, multiprocessors, same_device, stream

_DIM, _ROPE, _WINDOW = 512, 64, 128
_MOST_SELECTED = 1 << 20


def fits(q: torch.Tensor, ring: torch.Tensor, window: int, selected: int, rope: torch.Tensor) -> bool:
    """Whether a kernel takes these shapes: packed rows of 512 channels, 64 of them rotated, a window up to 128."""
    sizes = q.shape[2] == _DIM and rope.shape[1] == _ROPE and window <= _WINDOW and selected < _MOST_SELECTED
    return sizes and ring.dtype is torch.uint8


def sparse_attention(
    q: torch.Tensor,
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    pages: torch.Tensor | None,
    rows_per_block: int,
    block_table: torch.Tensor | None,
    indices: torch.Tensor | None,
    sink: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mla_fp4.sparse_attention`; `pages`, `block_table` and `indices` None for a window alone.

    The kernels read and write bfloat16; a float32 `q` is rounded to it and the result is widened.
    """
    same_device(
        q, new_rows=new_rows, ring=ring, ring_slot=ring_slot, cu_seqlens=cu_seqlens, start_pos=start_pos, lower=lower,
        pages=pages, block_table=block_table, indices=indices, sink=sink, rope=rope, out=out,
    )  # fmt: skip
    rows, heads, _ = q.shape
    if rows == 0:
        return torch.empty_like(q) if out is None else out
    query = q.to(torch.bfloat16)
    if not aligned(query):
        query = query.clone()
    direct = out is not None and out.dtype is torch.bfloat16 and aligned(out)
    result = out if direct and out is not None else torch.empty_like(query)
    selected = 0 if indices is None else indices.shape[1]
    cuda_module("mla_fp4").sparse_attention(
        q=query.data_ptr(),
        new_rows=new_rows.data_ptr(),
        ring=ring.data_ptr(),
        ring_slot=ring_slot.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        start_pos=start_pos.data_ptr(),
        lower=lower.data_ptr(),
        pages=0 if pages is None else pages.data_ptr(),
        block_table=0 if block_table is None else block_table.data_ptr(),
        indices=0 if indices is None else indices.data_ptr(),
        sink=sink.data_ptr(),
        rope=rope.data_ptr(),
        out=result.data_ptr(),
        rows=rows,
        heads=heads,
        batch=start_pos.shape[0],
        slots=ring.shape[0],
        ring_rows=ring.shape[1],
        window=window,
        blocks=0 if pages is None else pages.shape[0],
        rows_per_block=rows_per_block,
        table_width=0 if block_table is None else block_table.shape[1],
        selected=selected,
        scale=scale,
        multiprocessors=multiprocessors(q.device),
        stream=stream(q.device),
    )
    if direct:
        return result
    return result.to(q.dtype) if out is None else out.copy_(result)
