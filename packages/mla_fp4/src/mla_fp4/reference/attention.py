"""Attention over window and selected rows, in plain PyTorch."""

from __future__ import annotations

import torch

from kernel_core import formats
from kernel_core.attention import attend, row_requests, window_keys


def selected_keys(
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selected keys of every row: float32 [T, K, D] (zeros where the index is -1), and bool [T, K]."""
    seen = indices >= 0
    if pages.shape[0] == 0 or block_table.shape[1] == 0:
        width = pages.shape[-1] if pages.is_floating_point() else formats.main_row_width(pages.shape[-1])
        return torch.zeros(*indices.shape, width, device=pages.device), seen
    request, _ = row_requests(cu_seqlens, start_pos, indices.shape[0])
    position = indices.long().masked_fill(~seen, 0)
    # table entries of unselected places are never used, whatever they hold
    block = block_table.long()[request[:, None], position // rows_per_block].masked_fill(~seen, 0)
    rows = pages[block, position % rows_per_block]
    keys = rows if pages.is_floating_point() else formats.dequantize_main(rows)
    return keys.masked_fill(~seen[..., None], 0.0), seen


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
    """`mla_fp4.sparse_attention`."""
    if q.shape[0] == 0:
        return torch.empty_like(q)
    near, near_seen = window_keys(new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window)
    far, far_seen = selected_keys(pages, rows_per_block, block_table, cu_seqlens, start_pos, indices)
    keys, seen = torch.cat((near, far), dim=1), torch.cat((near_seen, far_seen), dim=1)
    return attend(q, keys, seen, sink, rope, scale)
