"""The indexer: scores of compressed positions, and the best of them."""

from __future__ import annotations

import torch

from cann_ops.kernels import Kernel
from cann_ops.launch import launch, place
from cann_ops.ops.rows import kv_rows
from cann_ops.reference import indexer as reference
from kernel_core import check
from kernel_core.attention import row_requests

_F32, _I32 = torch.float32, torch.int32
_DIM = 128


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
    *,
    longest: int | None = None,
) -> torch.Tensor:
    """score(j) = sum over h of head_weights[h] · relu(q_h · key_j), float32; `mla_fp4.index_scores` says more.

    Queries are rounded to MXFP4 by the rule of the keys, and the cube multiplies codes and scales as they are: products
    are exact, sums float32 in a fixed order.

    Args:
        q: float32 [T, H, 128], H 16, 32 or 64.
        head_weights: float32 [T, H].
        pages: uint8 [NB, rows_per_block · 68]; rows_per_block 32, 64 or 128.
        block_table: int32 [B, M]; cu_seqlens: int32 [B + 1]; visible: int32 [T], positions that a row may score.
        longest: width of the result, at least the largest of `visible`; needed on an NPU, where looking would wait.

    Returns:
        float32 [T, longest]; -inf from a row's visible count on.

    Raises ValueError and CannUnavailableError as `kv_rows`. Block ids are not looked at.
    """
    rows, heads = _check(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible)
    where = place("cann_ops.index_scores", q)
    if where == "reference":
        scores = reference.index_scores(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible)
        return scores if longest is None else torch.nn.functional.pad(
            scores, (0, longest - scores.shape[1]), value=-torch.inf
        )  # fmt: skip
    if longest is None:
        if where == "npu":
            raise ValueError("longest: got None, allowed on an NPU is the largest of visible")
        longest = int(visible.max()) if rows else 0
    scores = q.new_full((rows, longest), -torch.inf)
    if rows == 0 or longest == 0:
        return scores
    packed = kv_rows(q.reshape(rows * heads, _DIM), None, 1.0, None, format="index").view(rows, heads, -1)
    request, _ = row_requests(cu_seqlens, torch.zeros_like(cu_seqlens[1:]), rows)
    codes = rows_per_block * _DIM // 2
    given = {
        "q_codes": packed[..., : _DIM // 2].contiguous(),
        "q_scales": packed[..., _DIM // 2 :].contiguous().view(torch.int16),
        "head_weights": head_weights,
        "key_codes": pages,
        "key_scales": pages.view(-1)[codes:].view(torch.int16),  # of the first page; the kernel knows the pitch
        "table": block_table,
        "request": request.int(),
        "visible": visible,
        "scores": scores,
    }
    kernel = Kernel.of("index_scores", heads=heads, rows_per_block=rows_per_block)
    launch(kernel, given, written=[], scalars={"blocks": pages.shape[0]})
    return scores


def select_top(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of the first visible[t] scores of each row.

    Args:
        scores: float32 [T, width]; visible: int32 [T], up to width; k: 1 to 4096.

    Returns:
        int32 [T, k] ascending, -1 behind them where fewer are visible. Ties go to the lower place; NaN ranks as -inf.

    Raises ValueError and CannUnavailableError as `kv_rows`.
    """
    check.tensor("scores", scores, dtype=_F32, shape=(None, None))
    rows, width = scores.shape
    check.tensor("visible", visible, dtype=_I32, shape=(rows,))
    check.require(1 <= k <= 4096, "k", k, "1 to 4096")
    if place("cann_ops.select_top", scores) == "reference":
        return reference.select_top(scores, visible, k)
    out = visible.new_full((rows, k), -1)
    if rows and width:
        launch(
            Kernel.of("select_top", k=k), {"scores": scores, "visible": visible, "indices": out}, written=["indices"]
        )
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
    publish_blocks: int = 0,
    longest: int | None = None,
) -> tuple[torch.Tensor, None]:
    """The k best compressed positions of every row: `index_scores`, then `select_top`.

    Arguments as there. Candidate blocks and their publication have no kernels here (NotImplementedError).
    """
    if candidates is not None or publish_blocks:
        raise NotImplementedError(
            "cann_ops.index_topk has no kernels for candidates and publish_blocks; what exists: all visible positions"
        )
    scores = index_scores(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible, longest=longest)
    return select_top(scores, visible, k), None


def _check(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible) -> tuple[int, int]:
    check.tensor("q", q, dtype=_F32, shape=(None, None, _DIM))
    rows, heads, _ = q.shape
    check.require(heads in (16, 32, 64), "q", f"{heads} heads", "16, 32 or 64")
    check.require(rows_per_block in (32, 64, 128), "rows_per_block", rows_per_block, "32, 64 or 128")
    check.tensor("head_weights", head_weights, dtype=_F32, shape=(rows, heads))
    check.tensor("pages", pages, dtype=torch.uint8, shape=(None, rows_per_block * 68))
    check.tensor("block_table", block_table, dtype=_I32, shape=(None, None))
    check.tensor("cu_seqlens", cu_seqlens, dtype=_I32, shape=(block_table.shape[0] + 1,))
    check.tensor("visible", visible, dtype=_I32, shape=(rows,))
    return rows, heads
