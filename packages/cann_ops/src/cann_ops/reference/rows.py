"""Norms, rotation, cache rows and their slots."""

from __future__ import annotations

import torch

from kernel_core import formats
from kernel_core.attention import row_requests

_QUANTIZE = {"main": formats.quantize_main, "window": formats.quantize_window, "index": formats.quantize_index}


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight; unchanged without a weight."""
    if weight is None:
        return x
    return x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * weight


def rotate(x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
    """Adjacent pairs of the last channels of x [T, D] by the angles of rope [T, cosines then sines]."""
    if rope is None:
        return x
    cos, sin = rope.chunk(2, dim=-1)
    kept, turned = x[:, : -rope.shape[1]], x[:, -rope.shape[1] :]
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([kept, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)


def kv_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor | None,
    *,
    format: str = "main",
    round_bf16: bool = False,
) -> torch.Tensor:
    """Norm, rotation, quantisation: see `cann_ops.kv_rows`."""
    for step in (lambda y: rms_norm(y, weight, eps), lambda y: rotate(y, rope)):
        x = step(x)
        if round_bf16:
            x = x.bfloat16().float()
    return _QUANTIZE[format](x)


def norm_quantize(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and UE8M0 scales of the normed rows: see `cann_ops.norm_quantize`."""
    return split_window(formats.quantize_window(rms_norm(x, weight, eps)))


def split_window(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Window rows as (float8_e4m3fn codes, uint8 scales)."""
    width = formats.window_row_width(rows.shape[-1])
    return rows[..., :width].contiguous().view(torch.float8_e4m3fn), rows[..., width:].contiguous()


def store_main(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Row i to slot slots[i]; -1 skips it."""
    kept = slots >= 0
    pages.view(-1, pages.shape[-1])[slots[kept]] = rows[kept]


def store_index(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rows_per_block: int) -> None:
    """The same into pages of all codes, then all scales."""
    kept = slots >= 0
    block, place = slots[kept] // rows_per_block, slots[kept] % rows_per_block
    codes, scales = formats.split_index_page(pages, rows_per_block)
    codes[block, place] = rows[kept][:, : codes.shape[-1]]
    scales[block, place] = rows[kept][:, codes.shape[-1] :]


def window_slots(
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    floor: torch.Tensor,
    ring_slot: torch.Tensor,
    ring_size: int,
    rows: int,
) -> torch.Tensor:
    """Flat ring row of each new row, int64 [T]; -1 for what is not stored: below the floor, or replaced in the step."""
    request, position = row_requests(cu_seqlens, start_pos, rows)
    end = start_pos + (cu_seqlens[1:] - cu_seqlens[:-1])
    stored = (position >= floor[request]) & (position >= end[request] - ring_size)
    stored &= torch.arange(rows, device=cu_seqlens.device) < cu_seqlens[-1]
    slot = ring_slot.long()[request] * ring_size + position.remainder(ring_size)
    return torch.where(stored & (ring_slot[request] >= 0), slot, -1)


def store_window(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    floor: torch.Tensor,
) -> None:
    """A step's window rows into the rings: see `cann_ops.store_window`."""
    slots = window_slots(cu_seqlens, start_pos, floor, ring_slot, ring.shape[1], new_rows.shape[0])
    store_main(new_rows, ring, slots)
