"""The semantics in plain PyTorch, float32."""

from __future__ import annotations

import torch

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
    *,
    block: bool = False,
    longest: int | None = None,
) -> torch.Tensor:
    """`swa_replay.window_attention`; `longest` as in `kernel_core.attention.window_keys`."""
    if q.shape[0] == 0:
        return torch.empty_like(q)
    keys, seen = window_keys(new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, block, longest)
    return attend(q, keys, seen, sink, rope, scale)


def store_window(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    floor: torch.Tensor,
) -> None:
    """`swa_replay.store_window`."""
    request, position = row_requests(cu_seqlens, start_pos)
    end = start_pos + (cu_seqlens[1:] - cu_seqlens[:-1])
    stored = (position >= floor[request]) & (position >= end[request] - ring.shape[1])
    request, position = request[stored], position[stored]
    ring[ring_slot.long()[request], position % ring.shape[1]] = new_rows[stored]
