"""Index scores and their best positions."""

from __future__ import annotations

import torch

from kernel_core import formats

_NEVER = -float("inf")


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Scores float32 [T, most visible], -inf where a position is not visible: see `cann_ops.index_scores`."""
    width = int(visible.max()) if len(visible) else 0
    q = formats.dequantize_index(formats.quantize_index(q.float()))
    out = torch.full((q.shape[0], width), _NEVER)
    for b in range(len(block_table)):
        rows = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        longest = int(visible[rows].max()) if rows.stop > rows.start else 0
        used = block_table[b, : -(-longest // rows_per_block)].long()
        keys = formats.dequantize_index(formats.index_page_rows(pages[used], rows_per_block)).flatten(0, 1)[:longest]
        dots = torch.einsum("thd,kd->thk", q[rows], keys).relu()
        scores = torch.einsum("th,thk->tk", head_weights[rows], dots)
        hidden = torch.arange(longest) >= visible[rows, None]
        out[rows, :longest] = scores.masked_fill(hidden, _NEVER)
    return out


def select_top(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [T, k]: the k best of the first visible[t], ascending, -1 behind; ties to the lower, NaN is -inf."""
    out = torch.full((len(scores), k), -1, dtype=torch.int32)
    for t, count in enumerate(visible.tolist()):
        row = scores[t, : min(count, scores.shape[1])].nan_to_num(nan=_NEVER, posinf=float("inf"), neginf=_NEVER)
        best = row.sort(descending=True, stable=True).indices[:k].sort().values
        out[t, : len(best)] = best.int()
    return out
