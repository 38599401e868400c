"""Latent attention in plain PyTorch, float32: the parts that the references of several packages share.

Rows are gathered once, dequantised once and met by batched products, so it is also a fair baseline for timing. It works
on the device of its tensors and reads nothing back (see `longest` of `window_keys` for the exception).
"""

from __future__ import annotations

import torch

from kernel_core import formats


def _dequantise(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.is_floating_point() else formats.dequantize_window(rows)


def row_requests(
    cu_seqlens: torch.Tensor, start_pos: torch.Tensor, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of every row of a ragged batch: int64 [T], int64 [T].

    `rows` is T where the caller knows it; then no value is read back from the device. Rows behind the last request
    count as its own.
    """
    if rows is None:
        rows = int(cu_seqlens[-1])
    row = torch.arange(rows, device=cu_seqlens.device)
    request = torch.searchsorted(cu_seqlens[1:].long(), row, right=True).clamp_(max=max(0, len(cu_seqlens) - 2))
    return request, start_pos[request] + row - cu_seqlens.long()[request]


def window_keys(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    block: bool = False,
    longest: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Window keys of every row: float32 [T, n, D] by position (zeros where none), and bool [T, n].

    The last `window` positions of each row, or with `block` all new rows of its request and `window` before them;
    `longest` bounds a request's rows then, and without it the longest is looked for, which reads from the device.
    """
    device = new_rows.device
    request, position = row_requests(cu_seqlens, start_pos, new_rows.shape[0])
    reach = window if block else window - 1
    history = start_pos[:, None] - torch.arange(reach, 0, -1, device=device)  # positions before a chunk: [B, reach]
    slot = ring_slot.long().clamp(0, ring.shape[0] - 1)  # a request without rows may hold anything
    kept = _dequantise(ring[slot[:, None], history.remainder(ring.shape[1])])
    pool = torch.cat((kept.flatten(0, 1), _dequantise(new_rows)))
    start = start_pos[request][:, None]
    end = start + (cu_seqlens[1:] - cu_seqlens[:-1])[request][:, None]
    if block:
        if longest is None:
            longest = int((end - start).max())
        key = start + torch.arange(-window, longest, device=device)
    else:
        key = position[:, None] - torch.arange(window - 1, -1, -1, device=device)
    seen = (key >= 0) & (key >= lower[request][:, None]) & (key < end)
    from_ring = request[:, None] * reach + key - (start - reach)
    from_new = history.numel() + cu_seqlens.long()[request][:, None] + key - start
    source = torch.where(key < start, from_ring, from_new).masked_fill(~seen, 0)
    return pool[source].masked_fill(~seen[..., None], 0.0), seen


def softmax_with_sink(scores: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Weights [T, H, keys] of scores [T, H, keys] over the keys in `seen` [T, keys], sink [H] in the denominator."""
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None])
    weights = torch.exp(scores - top)
    weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top))
    nothing = ~seen.any(-1)[:, None, None] | torch.isposinf(sink)[:, None]
    return weights.masked_fill(nothing, 0.0)


def unrotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turn the last channels of x [T, H, D] back by the angles of rope [T, rope_dim]."""
    if rope.shape[1] == 0:
        return x
    cos, sin = rope[:, None].chunk(2, dim=-1)
    even, odd = x[..., -rope.shape[1] :].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., : -rope.shape[1]], turned), dim=-1)


def attend(
    q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor, rope: torch.Tensor, scale: float
) -> torch.Tensor:
    """One softmax of q [T, H, D] over keys [T, n, D] that are also the values; the result is turned back by rope."""
    scores = torch.bmm(q, keys.transpose(1, 2)) * scale
    return unrotate(torch.bmm(softmax_with_sink(scores, seen, sink), keys), rope)
