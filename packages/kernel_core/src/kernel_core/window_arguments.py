"""The arguments that every attention over window rows takes, checked in one place."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_core import check

_F32, _I32, _I64, _U8 = torch.float32, torch.int32, torch.int64, torch.uint8


class WindowSizes(NamedTuple):
    """Sizes of one call. `packed` says that rows are bytes in the stored format, not float32."""

    rows: int
    heads: int
    dim: int
    batch: int
    slots: int
    ring_rows: int
    rope_dim: int
    packed: bool


def check_window(
    q: torch.Tensor,
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    sink: torch.Tensor,
    rope: torch.Tensor,
    out: torch.Tensor | None,
) -> WindowSizes:
    """Sizes of a call whose arguments fit one another; `ValueError` names the first that does not.

    Shapes are those of `mla_fp4.sparse_attention` and `swa_replay.window_attention`. What stands in `ring_slot` and
    `cu_seqlens` is checked by the kernel.
    """
    if q.dtype is not _F32 or q.dim() != 3 or not q.is_contiguous():
        check.tensor("q", q, dtype=_F32 if q.is_cpu else (_F32, torch.bfloat16), shape=(None, None, None))
    rows, heads, dim = q.shape
    if heads < 1 or dim < 1 or dim % 32:
        check.require(False, "q", list(q.shape), "heads, and a multiple of 32 channels")
    packed = ring.dtype is _U8
    row = dim + dim // 32 if packed else dim
    if ring.dim() != 3 or ring.shape[2] != row or not (packed or ring.dtype is _F32) or not ring.is_contiguous():
        check.tensor("ring", ring, dtype=(_U8, _F32), shape=(None, None, row))
    slots, ring_rows, _ = ring.shape
    if not 0 < window <= ring_rows:
        check.require(False, "window", window, f"1 to {ring_rows}, the rows of a ring")
    if rope.dim() != 2:
        check.tensor("rope", rope, dtype=_F32, shape=(rows, None))
    batch, rope_dim = start_pos.numel(), rope.shape[1]
    if rope_dim % 2 or rope_dim > dim:
        check.require(False, "rope", f"{rope_dim} channels", f"an even number up to {dim}")
    check.exactly(
        ("new_rows", new_rows, ring.dtype, (rows, row)),
        ("ring_slot", ring_slot, _I32, (batch,)),
        ("cu_seqlens", cu_seqlens, _I32, (batch + 1,)),
        ("start_pos", start_pos, _I64, (batch,)),
        ("lower", lower, _I64, (batch,)),
        ("sink", sink, _F32, (heads,)),
        ("rope", rope, _F32, (rows, rope_dim)),
    )
    if out is not None:
        check.exactly(("out", out, q.dtype, (rows, heads, dim)))
    return WindowSizes(rows, heads, dim, batch, slots, ring_rows, rope_dim, packed)
