"""Ratio-2 pooling of neighbouring tokens."""

from __future__ import annotations

import torch


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    tail: torch.Tensor,
    tail_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
) -> torch.Tensor:
    """Pool (even, odd) position pairs and refresh the tail: see `mla_fp4.compress`."""
    ring = tail.shape[1]
    pooled = [kv.new_empty(0, kv.shape[1])]
    for b, (slot, start) in enumerate(zip(tail_slot.tolist(), start_pos.tolist(), strict=True)):
        rows = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        values, gates = kv[rows], gate[rows]
        n = values.shape[0]
        if n == 0:
            continue
        if start % 2:  # the first pair began in an earlier step
            before = tail[slot, (start - 1) % ring]
            values, gates = torch.cat([before[1:2], values]), torch.cat([before[0:1], gates])
        pairs = values.shape[0] // 2
        weights = torch.softmax(gates[: 2 * pairs].view(pairs, 2, kv.shape[1]), dim=1)
        pooled.append((weights * values[: 2 * pairs].view(pairs, 2, kv.shape[1])).sum(1))
        last = torch.arange(max(0, n - ring), n)
        tail[slot, (start + last) % ring] = torch.stack([gate[rows][last], kv[rows][last]], dim=1)
    return torch.cat(pooled)
