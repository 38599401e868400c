"""Ratio-2 pooling of neighbouring tokens, with the tail that carries a pair over a step."""

from __future__ import annotations

from typing import Any

import torch

import mla_fp4.reference.compressor as reference
from kernel_core import check, elsewhere, register_op, use_reference
from mla_fp4.native import native

_F32 = torch.float32


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    tail: torch.Tensor,
    tail_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    *,
    groups: int | None = None,
) -> torch.Tensor:
    """Pool token pairs (2j, 2j+1) into one latent row each; keep the newest rows for the next step.

    Formula: docs/model.md, Compressor.

    For every row at an odd position p, per channel: softmax over (gate[p-1], gate[p]) weighs (kv[p-1], kv[p]). A
    partner of an earlier step comes from the tail, a ring addressed by position, so that rows of rejected drafts
    are overwritten when their positions are computed again. A ring of R rows allows going back by R - 1 positions.

    Args:
        kv, gate: float32 [T, D], rows of the ragged batch.
        tail: float32 [S, R, 2, D], changed: row p mod R of a slot holds (gate, kv) of position p. The last min(n, R)
            rows of a request of n rows are stored after all reads.
        tail_slot: int32 [B]; requests with rows have distinct slots.
        cu_seqlens: int32 [B + 1]; request b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        start_pos: int64 [B], position of a request's first row.
        groups: G where the caller knows it; needed on a GPU, where counting would wait for the device.

    Returns:
        float32 [G, D], one row for each odd position, in row order. Not yet normed or rounded. On a GPU G may be larger
        than the number of odd positions; the rows behind them are zeros.

    Raises:
        ValueError: a dtype, shape, slot or offset that does not fit; nothing is written then. On a GPU slots and
            offsets are not checked: rows of wrong ones are NaN or missing.
        NotImplementedError: the tensors' device has no implementation.
    """
    check.tensor("kv", kv, dtype=_F32, shape=(None, None))
    rows, d = kv.shape
    check.tensor("gate", gate, dtype=_F32, shape=(rows, d))
    check.tensor("tail", tail, dtype=_F32, shape=(None, None, 2, d))
    if tail.shape[1] == 0:
        check.require(False, "tail", list(tail.shape), "at least one row a slot")
    check.tensor("start_pos", start_pos, dtype=torch.int64, shape=(None,))
    batch = start_pos.shape[0]
    check.tensor("tail_slot", tail_slot, dtype=torch.int32, shape=(batch,))
    check.tensor("cu_seqlens", cu_seqlens, dtype=torch.int32, shape=(batch + 1,))
    arguments: tuple[Any, ...] = (kv, gate, tail, tail_slot, cu_seqlens, start_pos)
    if use_reference():
        return reference.compress(*arguments)
    if path := elsewhere("mla_fp4.compress", kv, kernels=True):
        return _elsewhere(path, arguments, groups)
    cu, start = cu_seqlens.data_ptr(), start_pos.data_ptr()
    found = native.count_groups(cu, start, batch, rows)
    if groups is not None and groups != found:
        check.require(False, "groups", groups, f"{found}, the odd positions of this batch")
    out = torch.empty(found, d)
    native.compress(
        kv.data_ptr(),
        gate.data_ptr(),
        tail.data_ptr(),
        tail_slot.data_ptr(),
        cu,
        start,
        out.data_ptr(),
        batch,
        rows,
        d,
        tail.shape[0],
        tail.shape[1],
    )
    return out


def _elsewhere(path: str, arguments: tuple[Any, ...], groups: int | None) -> torch.Tensor:
    kv, gate, tail, slot, cu_seqlens, start_pos = arguments
    if groups is None:
        if not kv.is_cpu:
            raise ValueError("groups: got None, allowed on a GPU is the number of rows to return")
        groups = native.count_groups(cu_seqlens.data_ptr(), start_pos.data_ptr(), start_pos.shape[0], kv.shape[0])
    from mla_fp4 import library
    from mla_fp4.cuda import rows as cuda

    if path == "cuda" and cuda.fits_compress(kv, gate, tail):
        return cuda.compress(kv, gate, tail, slot, cu_seqlens, start_pos, groups)
    return library.compress(kv, gate, tail, slot, cu_seqlens, start_pos, groups)


def _fake(kv, gate, tail, tail_slot, cu_seqlens, start_pos, groups=None):
    if groups is None:
        groups = torch.library.get_ctx().new_dynamic_size()
    return kv.new_empty(groups, kv.shape[1])


register_op(
    "mla_fp4",
    "compress(Tensor kv, Tensor gate, Tensor(a!) tail, Tensor tail_slot, Tensor cu_seqlens, Tensor start_pos, "
    "int? groups=None) -> Tensor",
    lambda kv, gate, tail, slot, cu, start, groups=None: compress(kv, gate, tail, slot, cu, start, groups=groups),
    _fake,
)
