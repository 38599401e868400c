"""Index scores, their best positions, and the best blocks of positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernel_core import formats

_TEMPORARY = 1 << 24  # floats of one [rows, heads, keys] product
_NEVER = -float("inf")


def _keys(pages: torch.Tensor, rows_per_block: int, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` keys of a request, float32 [count, D]."""
    used = pages[blocks[: -(-count // rows_per_block)].long()]
    if pages.dtype == torch.uint8:
        used = formats.dequantize_index(formats.index_page_rows(used, rows_per_block))
    return used.flatten(0, 1)[:count]


def _row_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Scores [rows, keys] of some rows at a time; -inf from a row's visible count on."""
    if pages.dtype == torch.uint8:
        q = formats.dequantize_index(formats.quantize_index(q))
    heads = q.shape[1]
    for b in range(block_table.shape[0]):
        first, end = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
        longest = int(visible[first:end].max()) if end > first else 0
        keys = _keys(pages, rows_per_block, block_table[b], longest)
        step = max(1, _TEMPORARY // max(1, heads * longest))
        for row in range(first, end, step):
            rows = slice(row, min(row + step, end))
            products = (q[rows].flatten(0, 1) @ keys.T).relu_().view(rows.stop - rows.start, heads, longest)
            scores = torch.bmm(head_weights[rows].unsqueeze(1), products).squeeze(1)
            hidden = torch.arange(longest) >= visible[rows].unsqueeze(1)
            yield rows, scores.masked_fill_(hidden, _NEVER)


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Every score: see `mla_fp4.index_scores`."""
    out = torch.full((q.shape[0], int(visible.max()) if len(visible) else 0), _NEVER)
    for rows, scores in _row_scores(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible):
        out[rows, : scores.shape[1]] = scores
    return out


def select_top(scores: torch.Tensor, counts: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of the first counts[row] entries of each row, ties to the lower index, as int32 [rows, k] ascending.

    NaN ranks as -inf. Rows with fewer entries end in -1. Reads nothing back from the device, as all of this half.
    """
    rows, width = scores.shape
    device = scores.device
    if width == 0 or k == 0:
        return torch.full((rows, k), -1, dtype=torch.int32, device=device)
    ranked = torch.where(scores.isnan(), _NEVER, scores)
    entry = torch.arange(width, device=device)
    present = entry < counts.unsqueeze(1)
    taken = min(k, width)
    # the k-th best of what is present; where fewer are, every one of them
    bound = ranked.masked_fill(~present, _NEVER).topk(taken, dim=1).values[:, -1:]
    above, equal = present & (ranked > bound), present & (ranked == bound)
    chosen = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    order = torch.where(chosen, entry, width).topk(taken, dim=1, largest=False).values.sort(dim=1).values
    out = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    out[:, :taken] = torch.where(order < width, order, -1).int()
    return out


def publish_blocks(scores: torch.Tensor, visible: torch.Tensor, block: int, count: int) -> torch.Tensor:
    """The best `count` blocks by their largest visible score, the newest block always among them."""
    rows, width = scores.shape
    device = scores.device
    blocks = -(-width // block)
    padded = torch.full((rows, blocks * block), _NEVER, device=device)
    hidden = torch.arange(width, device=device) >= visible.unsqueeze(1)
    padded[:, :width] = torch.where(scores.isnan() | hidden, _NEVER, scores)
    best = padded.view(rows, blocks, block).amax(-1)
    present = -(-visible // block)
    newest = select_top(best, (present - 1).clamp(min=0), count - 1)
    out = torch.cat([newest, torch.full((rows, 1), -1, dtype=torch.int32, device=device)], dim=1)
    kept = (out >= 0).sum(1, keepdim=True)
    return out.scatter_(1, kept, (present - 1).int().unsqueeze(1))  # -1 where a row has no block


def index_topk(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    *,
    candidates: torch.Tensor | None = None,
    candidate_block: int = 8,
    publish_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The best positions of every row: see `mla_fp4.index_topk`."""
    indices = torch.full((q.shape[0], k), -1, dtype=torch.int32)
    blocks = torch.full((q.shape[0], publish_blocks), -1, dtype=torch.int32) if publish_blocks else None
    for rows, scores in _row_scores(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible):
        if candidates is None:
            indices[rows] = select_top(scores, visible[rows], k)
        else:
            indices[rows] = among(scores, visible[rows], candidates[rows], candidate_block, k)
        if blocks is not None:
            blocks[rows] = publish_best(scores, visible[rows], candidate_block, publish_blocks)
    return indices, blocks


publish_best = publish_blocks  # `index_topk` has an argument of the name


def among(scores: torch.Tensor, visible: torch.Tensor, candidates: torch.Tensor, block: int, k: int) -> torch.Tensor:
    """`select_top` over the visible positions of the candidate blocks, gathered next to each other."""
    positions = (candidates.long().unsqueeze(-1) * block + torch.arange(block, device=scores.device)).flatten(1)
    inside = (candidates >= 0).repeat_interleave(block, dim=1) & (positions < visible.unsqueeze(1))
    if scores.shape[1] == 0:
        return torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    gathered = scores.gather(1, positions.clamp(0, scores.shape[1] - 1))
    chosen = select_top(gathered, inside.sum(1), k)  # ids ascend, so what is inside comes first
    return torch.where(chosen >= 0, positions.gather(1, chosen.clamp(min=0).long()), -1).int()
