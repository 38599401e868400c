"""The ops in PyTorch's operators, on any device and without reading a value back, so that a CUDA graph can hold them.

What a GPU runs where no kernel takes the shapes. Attention, norm and rows share the reference, which is made that way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernel_core import formats
from kernel_core.attention import row_requests
from mla_fp4.reference.indexer import among, publish_best, select_top

_TEMPORARY = 1 << 27  # floats of the gathered keys of some rows


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    tail: torch.Tensor,
    tail_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    """`mla_fp4.compress` into `groups` rows; those behind the last pair are zeros."""
    rows, d = kv.shape
    if rows == 0:
        return torch.zeros(groups, d, device=kv.device)
    ring = tail.shape[1]
    request, position = row_requests(cu_seqlens, start_pos, rows)
    slot = tail_slot.long()[request].clamp(0, tail.shape[0] - 1)
    row = torch.arange(rows, device=kv.device)
    first, before = position == start_pos[request], (row - 1).clamp(min=0)
    old = tail[slot, (position - 1).remainder(ring)]
    gates = torch.stack((torch.where(first[:, None], old[:, 0], gate[before]), gate), dim=1)
    values = torch.stack((torch.where(first[:, None], old[:, 1], kv[before]), kv), dim=1)
    pooled = (torch.softmax(gates, dim=1) * values).sum(1)
    # Rows that complete a pair close up; the others, and pairs beyond `groups`, go to a row that is cut off.
    odd = position % 2 == 1
    place = torch.where(odd, odd.cumsum(0) - 1, groups).clamp(max=groups)
    out = torch.zeros(groups + 1, d, device=kv.device).index_copy_(0, place, pooled)[:groups]
    end = (start_pos + (cu_seqlens[1:] - cu_seqlens[:-1]))[request]
    newest = newest_of_place(row, position, end, ring)
    tail[slot, position.remainder(ring)] = torch.stack((gate[newest], kv[newest]), dim=1)
    return out


def newest_of_place(row: torch.Tensor, position: torch.Tensor, end: torch.Tensor, ring: int) -> torch.Tensor:
    """Of the rows of a request that share a ring's place, the last one: writers of one place write the same bytes."""
    return row + (end - 1 - position).div(ring, rounding_mode="floor") * ring


def _writers(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row: which row's bytes it writes, to which slot; and whether there are such bytes at all, a bool.

    A skipped row repeats what a kept row writes, and where none is kept, all write old bytes: no two writers of a place
    differ, and no shape depends on the slots.
    """
    kept = slots >= 0
    source = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
    return source, slots[source].clamp(min=0), kept.any()


def store_rows(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """`mla_fp4.store_main`."""
    flat = pages.view(-1, pages.shape[-1])
    if rows.shape[0] and flat.shape[0]:
        source, target, some = _writers(slots)
        flat[target] = torch.where(some, rows[source], flat[target])


def store_index(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rows_per_block: int) -> None:
    """`mla_fp4.store_index` of packed keys: pages hold codes and scales apart."""
    if rows.shape[0] == 0 or pages.shape[0] == 0:
        return
    source, target, some = _writers(slots)
    block, offset = target // rows_per_block, target % rows_per_block
    codes, scales = formats.split_index_page(pages, rows_per_block)
    written = rows[source]
    codes[block, offset] = torch.where(some, written[:, : codes.shape[-1]], codes[block, offset])
    scales[block, offset] = torch.where(some, written[:, codes.shape[-1] :], scales[block, offset])


def _scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    request: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """float32 [rows, width of the table] of some rows; -inf where a row does not see a position."""
    table = block_table.long().clamp(0, max(0, pages.shape[0] - 1))[request]
    used = pages[table]
    if pages.dtype == torch.uint8:
        q = formats.dequantize_index(formats.quantize_index(q))
        used = formats.dequantize_index(formats.index_page_rows(used, rows_per_block))
    keys = used.flatten(1, 2)
    products = torch.bmm(q, keys.transpose(1, 2)).relu_()
    scores = torch.bmm(head_weights.unsqueeze(1), products).squeeze(1)
    hidden = torch.arange(keys.shape[1], device=q.device) >= visible.unsqueeze(1)
    return scores.masked_fill_(hidden, -torch.inf)


def _row_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parts of the rows, so many that their keys fit, and their scores."""
    rows, width = q.shape[0], block_table.shape[1] * rows_per_block
    if rows == 0:
        return
    request, _ = row_requests(cu_seqlens, torch.zeros_like(cu_seqlens[1:], dtype=torch.int64), rows)
    step = max(1, _TEMPORARY // max(1, width * q.shape[2]))
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        if width == 0 or pages.shape[0] == 0:
            yield part, torch.full((part.stop - first, width), -torch.inf, device=q.device)
            continue
        yield (
            part,
            _scores(q[part], head_weights[part], pages, rows_per_block, block_table, request[part], visible[part]),
        )


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """`mla_fp4.index_scores`, as wide as the table reaches."""
    arguments = (q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible)
    out = torch.full((q.shape[0], block_table.shape[1] * rows_per_block), -torch.inf, device=q.device)
    for rows, scores in _row_scores(*arguments):
        out[rows] = scores
    return out


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
    """`mla_fp4.index_topk`."""
    arguments = (q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible)
    rows = q.shape[0]
    indices = torch.empty(rows, k, dtype=torch.int32, device=q.device)
    blocks = torch.empty(rows, publish_blocks, dtype=torch.int32, device=q.device) if publish_blocks else None
    for part, scores in _row_scores(*arguments):
        if candidates is None:
            indices[part] = select_top(scores, visible[part], k)
        else:
            indices[part] = among(scores, visible[part], candidates[part], candidate_block, k)
        if blocks is not None:
            blocks[part] = publish_best(scores, visible[part], candidate_block, publish_blocks)
    return indices, blocks
