"""Attention over window rows and selected rows."""

from __future__ import annotations

import torch

from kernel_core import formats
from kernel_core.attention import attend, row_requests, window_keys


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
) -> torch.Tensor:
    """See `cann_ops.window_attention`."""
    if q.shape[0] == 0:
        return torch.empty_like(q)
    keys, seen = window_keys(new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window)
    return attend(q.float(), keys, seen, sink, rope, scale).to(q.dtype)


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
) -> torch.Tensor:
    """See `cann_ops.sparse_attention`."""
    if q.shape[0] == 0:
        return torch.empty_like(q)
    near, near_seen = window_keys(new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window)
    place = page_rows(cu_seqlens, start_pos, block_table, rows_per_block, indices)
    far_seen = place >= 0
    flat = pages.flatten(0, 1)
    if len(flat):
        far = formats.dequantize_main(flat[place.clamp(min=0)]).masked_fill(~far_seen[..., None], 0.0)
    else:
        far = q.new_zeros(*place.shape, q.shape[2], dtype=torch.float32)
    keys, seen = torch.cat((near, far), 1), torch.cat((near_seen, far_seen), 1)
    return attend(q.float(), keys, seen, sink, rope, scale).to(q.dtype)


def page_rows(
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    block_table: torch.Tensor,
    rows_per_block: int,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Row of the flat pages for each selected position, int64 [T, K]; -1 where nothing is selected."""
    if block_table.shape[1] == 0 or indices.shape[0] == 0:
        return torch.full_like(indices, -1, dtype=torch.int64)
    request, _ = row_requests(cu_seqlens, start_pos, indices.shape[0])
    position = indices.long().clamp(min=0)
    block = block_table.long()[request[:, None], position // rows_per_block]
    return torch.where(indices >= 0, block * rows_per_block + position % rows_per_block, -1)


def near_rows(
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    ring_slot: torch.Tensor,
    ring_shape: tuple[int, int],
    rows: int,
) -> torch.Tensor:
    """Where a row's window keys lie, int64 [T, window], oldest first and -1 behind them.

    Below slots · ring size: a row of the flat rings. From there on: slots · ring size + a row of the new ones.
    """
    slots, ring_size = ring_shape
    request, position = row_requests(cu_seqlens, start_pos, rows)
    oldest = torch.maximum(lower[request], position - window + 1).clamp(min=0)
    key = oldest[:, None] + torch.arange(window, device=cu_seqlens.device)
    start = start_pos[request][:, None]
    slot = ring_slot.long().clamp(0, max(0, slots - 1))[request][:, None]
    from_ring = slot * ring_size + key.remainder(ring_size)
    from_new = slots * ring_size + cu_seqlens.long()[request][:, None] + key - start
    return torch.where(key > position[:, None], -1, torch.where(key < start, from_ring, from_new))
