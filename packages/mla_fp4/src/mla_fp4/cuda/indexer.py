"""Index scores and their best positions by the CUDA C++ kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_core.cuda import aligned, cuda_module, multiprocessors, same_device, stream, workspace

_DIM, _MOST_HEADS, _LARGEST_K, _WIDEST = 128, 64, 2048, 1 << 20
_FEWEST_ROWS, _MOST_ROWS = 16, 1 << 16  # of a page
_MAXIMA_BLOCK = 8  # positions of a maximum, fixed in the kernel
_SCORES = 1 << 28  # float32 scores that are held at once with candidates or blocks to publish
_SCORE_BYTES = 1 << 28  # and of the scores that index_topk keeps to itself


class Keys(NamedTuple):
    """What stays the same for all rows of a call."""

    pages: torch.Tensor
    rows_per_block: int
    block_table: torch.Tensor
    longest: int  # rows of a request at most


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def fits_scores(q: torch.Tensor, pages: torch.Tensor, rows_per_block: int) -> bool:
    """Whether the scoring kernel takes these shapes: packed keys of 128 channels, up to 64 heads."""
    return (
        pages.dtype is torch.uint8
        and q.shape[2] == _DIM
        and q.shape[1] <= _MOST_HEADS
        and _power_of_two(rows_per_block)
        and _FEWEST_ROWS <= rows_per_block <= _MOST_ROWS
        and aligned(q, pages)
    )


def fits_topk(k: int, width: int, candidate_block: int, publish_blocks: int, candidates: torch.Tensor | None) -> bool:
    """Whether the selection kernels take these sizes; `width` is the number of positions that a table reaches."""
    blocks = candidates is None or (_power_of_two(candidate_block) and candidates.shape[1] > 0)
    publishes = publish_blocks == 0 or (candidate_block == _MAXIMA_BLOCK and publish_blocks <= _LARGEST_K)
    width = width if candidates is None else candidates.shape[1] * candidate_block
    return k <= _LARGEST_K and 0 < width <= _WIDEST and blocks and publishes


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
    same_device(
        q, head_weights=head_weights, pages=pages, block_table=block_table, cu_seqlens=cu_seqlens, visible=visible
    )
    width = block_table.shape[1] * rows_per_block
    scores = torch.full((q.shape[0], width), -torch.inf, device=q.device)
    keys = Keys(pages, rows_per_block, block_table, q.shape[0])
    if scores.numel():
        _score(q, head_weights, keys, cu_seqlens, visible, width, scores=scores)
    return scores


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
    candidates: torch.Tensor | None,
    candidate_block: int,
    publish_blocks: int,
    longest: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`mla_fp4.index_topk`: scores of some rows, or of a piece of them, at a time, then the best of them."""
    same_device(
        q, head_weights=head_weights, pages=pages, block_table=block_table, cu_seqlens=cu_seqlens, visible=visible,
        candidates=candidates,
    )  # fmt: skip
    rows, device = q.shape[0], q.device
    keys = Keys(pages, rows_per_block, block_table, rows if longest is None else longest)
    width = block_table.shape[1] * rows_per_block if candidates is None else candidates.shape[1] * candidate_block
    indices = torch.empty(rows, k, dtype=torch.int32, device=device)
    if candidates is None and not publish_blocks:
        if rows:
            _score_and_select(q, head_weights, keys, cu_seqlens, visible, width, k, indices)
        return indices, None
    blocks = torch.empty(rows, publish_blocks, dtype=torch.int32, device=device) if publish_blocks else None
    stride = -(-width // 4) * 4
    step = max(1, _SCORES // stride)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        count = part.stop - first
        whole = count == rows
        cu = cu_seqlens if whole else (cu_seqlens - first).clamp_(0, count)
        seen, chosen = visible[part], None if candidates is None else candidates[part]
        scores = torch.empty(count, stride, device=device)
        tops = torch.empty(count, _maxima_stride(width), device=device) if blocks is not None else None
        _score(
            q[part], head_weights[part], keys, cu, seen, width, scores=scores, maxima=tops, candidates=chosen,
            candidate_block=candidate_block,
        )  # fmt: skip
        _best(scores, seen, width, k, indices[part], candidates=chosen, candidate_block=candidate_block)
        if blocks is not None and tops is not None:
            present = (seen + (_MAXIMA_BLOCK - 1)) // _MAXIMA_BLOCK
            _best(tops, present, -(-width // _MAXIMA_BLOCK), publish_blocks, blocks[part], keep_last=True)
    return indices, blocks


def _score_and_select(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Keys,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    k: int,
    out: torch.Tensor,
) -> None:
    """The k best positions of each row into `out`, by one call that never holds more than `_SCORE_BYTES` of scores."""
    module = cuda_module("mla_fp4")
    rows, heads, _ = q.shape
    scratch = workspace(module.index_topk_workspace(rows, heads, width, k, _SCORE_BYTES), q.device)
    module.index_topk(
        **_problem(q, head_weights, keys, cu_seqlens, visible, width),
        k=k,
        out=out.data_ptr(),
        workspace=scratch.data_ptr(),
        workspace_bytes=scratch.numel(),
        stream=stream(q.device),
    )


def _problem(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Keys,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
    width: int,
) -> dict[str, int]:
    """What scoring is about, as the bindings name it."""
    rows, heads, _ = q.shape
    return {
        "q": q.data_ptr(),
        "weights": head_weights.data_ptr(),
        "q_is_bf16": q.dtype is torch.bfloat16,
        "rows": rows,
        "heads": heads,
        "pages": keys.pages.data_ptr(),
        "blocks": keys.pages.shape[0],
        "rows_per_block": keys.rows_per_block,
        "block_table": keys.block_table.data_ptr(),
        "table_width": keys.block_table.shape[1],
        "cu_seqlens": cu_seqlens.data_ptr(),
        "batch": keys.block_table.shape[0],
        "visible": visible.data_ptr(),
        "longest_request": min(keys.longest, rows),
        "width": width,
    }


def _maxima_stride(width: int) -> int:
    return -(-width // (4 * _MAXIMA_BLOCK)) * 4


def _score(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Keys,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    *,
    scores: torch.Tensor,
    maxima: torch.Tensor | None = None,
    candidates: torch.Tensor | None = None,
    candidate_block: int = 1,
) -> None:
    """Scores of what each row sees, the rest of `scores` as it was; `maxima` of each 8 positions where wanted."""
    module = cuda_module("mla_fp4")
    rows, heads, _ = q.shape
    scratch = workspace(module.index_score_workspace(rows, heads), q.device)
    module.index_score(
        **_problem(q, head_weights, keys, cu_seqlens, visible, width),
        candidates=0 if candidates is None else candidates.data_ptr(),
        candidates_width=0 if candidates is None else candidates.shape[1],
        candidate_block=candidate_block,
        scores=scores.data_ptr(),
        stride=scores.stride(0),
        fill_hidden=False,
        maxima=0 if maxima is None else maxima.data_ptr(),
        maxima_stride=0 if maxima is None else maxima.stride(0),
        workspace=scratch.data_ptr(),
        stream=stream(q.device),
    )


def _best(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    width: int,
    k: int,
    out: torch.Tensor,
    *,
    candidates: torch.Tensor | None = None,
    candidate_block: int = 1,
    keep_last: bool = False,
) -> None:
    """The k best of the first lengths[row] entries of each row into `out` int32 [rows, k]."""
    module = cuda_module("mla_fp4")
    rows = scores.shape[0]
    slices = module.topk_slices(rows, width, k, multiprocessors(scores.device))
    scratch = workspace(module.topk_workspace(rows, k, slices), scores.device)
    module.topk(
        scores=scores.data_ptr(),
        stride=scores.stride(0),
        lengths=lengths.data_ptr(),
        rows=rows,
        width=width,
        k=k,
        out=out.data_ptr(),
        blocks=0 if candidates is None else candidates.data_ptr(),
        blocks_width=0 if candidates is None else candidates.shape[1],
        block=candidate_block,
        keep_last=keep_last,
        workspace=scratch.data_ptr(),
        slices=slices,
        stream=stream(scores.device),
    )
