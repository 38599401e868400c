"""The indexer: scores of compressed positions, and the best of them."""

from __future__ import annotations

from typing import Any

import torch

import mla_fp4.reference.indexer as reference
from kernel_core import check, elsewhere, register_op, use_reference
from mla_fp4.native import native

_F32, _I32 = torch.float32, torch.int32


def _check(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible) -> None:
    check.tensor("q", q, dtype=_F32 if q.is_cpu else (_F32, torch.bfloat16), shape=(None, None, None))
    rows, heads, dim = q.shape
    if heads == 0:
        check.require(False, "q", "0 heads", "at least one")
    check.tensor("head_weights", head_weights, dtype=_F32, shape=(rows, heads))
    check.require(rows_per_block > 0, "rows_per_block", rows_per_block, "a positive number")
    if pages.dtype == torch.uint8:
        if dim == 0 or dim % 32:
            check.require(False, "q", f"{dim} channels", "a multiple of 32 for packed pages")
        check.tensor("pages", pages, dtype=torch.uint8, shape=(None, rows_per_block * (dim // 2 + dim // 32)))
    else:
        check.tensor("pages", pages, dtype=(torch.uint8, _F32), shape=(None, rows_per_block, dim))
    check.tensor("block_table", block_table, dtype=_I32, shape=(None, None))
    check.tensor("cu_seqlens", cu_seqlens, dtype=_I32, shape=(block_table.shape[0] + 1,))
    check.tensor("visible", visible, dtype=_I32, shape=(rows,))


def _native_args(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible) -> tuple:
    rows, heads, dim = q.shape
    batch, width = block_table.shape
    return (
        q.data_ptr(),
        head_weights.data_ptr(),
        pages.data_ptr(),
        block_table.data_ptr(),
        cu_seqlens.data_ptr(),
        visible.data_ptr(),
        rows,
        heads,
        dim,
        batch,
        width,
        pages.shape[0],
        rows_per_block,
        pages.dtype == torch.uint8,
    )


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
    longest: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The k best compressed positions of every row, and optionally the best blocks of positions.

    Formula: docs/model.md, Indexer and Candidate blocks.

    score(j) = Σ_h head_weights[h] · relu(q_h · key_j), kept in float32. Over packed pages the queries are rounded to
    MXFP4 first, by the rule of the keys. Ties go to the lower position. A NaN score ranks as -inf, so it is chosen
    only where a row has no more than k positions; other rows and positions are not touched by it.

    On an NVIDIA GPU the kernels take packed pages of a power of two keys, 128 channels, up to 64 heads, k up to 2048
    and blocks of 8 positions; other shapes run in PyTorch's operators. The work grows with the M of the table there,
    not with `visible`. Offsets and block ids are not checked there, as that would wait for the device.

    Args:
        q: float32 [T, heads, D], already rotated. On a GPU bfloat16 too.
        head_weights: float32 [T, heads].
        pages: uint8 [blocks, rows_per_block · (D/2 + D/32)] as `store_index` writes them, or float32
            [blocks, rows_per_block, D].
        rows_per_block: keys in a page.
        block_table: int32 [B, M]; position j of request b is in page block_table[b, j // rows_per_block]. Entries
            that no visible position needs are not read.
        cu_seqlens: int32 [B + 1]; request b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        visible: int32 [T]; row t sees positions 0 to visible[t] - 1.
        k: how many positions to choose.
        candidates: int32 [T, C], ascending block ids with -1 from the first unused entry on: only positions in these
            blocks are scored. None scores all.
        candidate_block: positions in a block, for `candidates` and `publish_blocks`.
        publish_blocks: also choose this many blocks by their largest visible score (ties to the lower id). The block
            of the newest visible position is always among them. Not together with `candidates`.
        longest: no request has more rows; None stands for T. Sizes the launch on a GPU, never changes the result.

    Returns:
        indices: int32 [T, k], ascending, then -1.
        blocks: int32 [T, publish_blocks], ascending, then -1; None without `publish_blocks`.

    Raises:
        ValueError: a dtype, shape, offset or block id that does not fit.
        NotImplementedError: the tensors' device has no implementation.
    """
    _check(q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible)
    rows = q.shape[0]
    check.require(k > 0, "k", k, "a positive number")
    check.require(publish_blocks >= 0, "publish_blocks", publish_blocks, "0 or a positive number")
    check.require(candidate_block > 0, "candidate_block", candidate_block, "a positive number")
    if candidates is not None:
        check.tensor("candidates", candidates, dtype=_I32, shape=(rows, None))
        check.require(publish_blocks == 0, "publish_blocks", publish_blocks, "0 when candidates are given")
    arguments = (q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible)
    if use_reference():
        return reference.index_topk(
            *arguments, k, candidates=candidates, candidate_block=candidate_block, publish_blocks=publish_blocks
        )
    if path := elsewhere("mla_fp4.index_topk", q, kernels=True):
        return _topk_elsewhere(
            path, arguments, k, longest, candidates=candidates, candidate_block=candidate_block,
            publish_blocks=publish_blocks,
        )  # fmt: skip
    indices = torch.empty(rows, k, dtype=_I32)
    blocks = torch.empty(rows, publish_blocks, dtype=_I32) if publish_blocks else None
    native.index_topk(
        *_native_args(*arguments),
        0 if candidates is None else candidates.data_ptr(),
        -1 if candidates is None else candidates.shape[1],
        candidate_block,
        k,
        indices.data_ptr(),
        publish_blocks,
        0 if blocks is None else blocks.data_ptr(),
    )
    return indices, blocks


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """All scores that `index_topk` ranks, float32 [T, largest visible], -inf where a row does not see a position.

    Arguments and errors are those of `index_topk`. For tests and analysis: the result grows with the context. On a GPU
    it is as wide as the table reaches, M · rows_per_block, since the largest visible count is not known there.
    """
    arguments = (q, head_weights, pages, rows_per_block, block_table, cu_seqlens, visible)
    _check(*arguments)
    if use_reference():
        return reference.index_scores(*arguments)
    if path := elsewhere("mla_fp4.index_scores", q, kernels=True, triton=True):
        return _scores_elsewhere(path, arguments)
    width = max(0, int(visible.max())) if len(visible) else 0
    out = torch.empty(q.shape[0], width)
    native.index_scores(*_native_args(*arguments), out.data_ptr(), width)
    return out


def _topk_elsewhere(
    path: str, arguments: tuple[Any, ...], k: int, longest: int | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from mla_fp4 import library
    from mla_fp4.cuda import indexer as cuda

    q, head_weights, pages, rows_per_block, *batch = arguments
    table, cu_seqlens, visible = batch
    keys, rows = (pages, rows_per_block, table), (cu_seqlens, visible)
    sizes = (k, table.shape[1] * rows_per_block, options["candidate_block"], options["publish_blocks"])
    if path == "cuda" and cuda.fits_scores(q, pages, rows_per_block) and cuda.fits_topk(*sizes, options["candidates"]):
        return cuda.index_topk(q, head_weights, *keys, *rows, k, longest=longest, **options)
    return library.index_topk(q.float(), head_weights, *keys, *rows, k, **options)


def _scores_elsewhere(path: str, arguments: tuple[Any, ...]) -> torch.Tensor:
    q, _, pages, rows_per_block, *_ = arguments
    if path == "triton":
        from mla_fp4 import triton_index

        return triton_index.index_scores(*arguments)
    from mla_fp4 import library
    from mla_fp4.cuda import indexer as cuda

    if path == "cuda" and cuda.fits_scores(q, pages, rows_per_block):
        return cuda.index_scores(*arguments)
    return library.index_scores(q.float(), *arguments[1:])


def _registered_topk(*args, candidates=None, candidate_block=8, publish_blocks=0):
    indices, blocks = index_topk(
        *args, candidates=candidates, candidate_block=candidate_block, publish_blocks=publish_blocks
    )
    return indices, indices.new_empty(indices.shape[0], 0) if blocks is None else blocks


def _topk_fake(q, w, pages, rpb, table, cu, visible, k, *, candidates=None, candidate_block=8, publish_blocks=0):
    rows = q.shape[0]
    return q.new_empty(rows, k, dtype=_I32), q.new_empty(rows, publish_blocks, dtype=_I32)


def _scores_fake(q, *args):
    return q.new_empty(q.shape[0], torch.library.get_ctx().new_dynamic_size())


_SHARED = (
    "Tensor q, Tensor head_weights, Tensor pages, int rows_per_block, Tensor block_table, Tensor cu_seqlens, "
    "Tensor visible"
)
register_op(
    "mla_fp4",
    f"index_topk({_SHARED}, int k, *, Tensor? candidates=None, int candidate_block=8, int publish_blocks=0) "
    "-> (Tensor, Tensor)",
    _registered_topk,
    _topk_fake,
)
register_op("mla_fp4", f"index_scores({_SHARED}) -> Tensor", index_scores, _scores_fake)
