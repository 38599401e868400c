"""`store_window` in PyTorch's operators, on any device and without reading a value back; a CUDA graph can hold it."""

from __future__ import annotations

import torch

from kernel_core.attention import row_requests


def store_window(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    floor: torch.Tensor,
) -> None:
    """`swa_replay.store_window`. Every row writes what the last row of its place in the ring has to write there."""
    rows, size = new_rows.shape[0], ring.shape[1]
    if rows == 0 or start_pos.shape[0] == 0:
        return
    request, position = row_requests(cu_seqlens, start_pos, rows)
    end = (start_pos + (cu_seqlens[1:] - cu_seqlens[:-1]))[request]
    later = (end - 1 - position).div(size, rounding_mode="floor") * size
    source = torch.arange(rows, device=new_rows.device) + later
    slot, place = ring_slot.long()[request].clamp(0, ring.shape[0] - 1), position.remainder(size)
    stored = (position + later >= floor[request])[:, None]
    ring[slot, place] = torch.where(stored, new_rows[source.clamp(0, rows - 1)], ring[slot, place])
