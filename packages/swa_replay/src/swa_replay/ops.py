"""Public ops: attention over the window, and storing a step's rows in the rings."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

from kernel_core import check, elsewhere, register_op, use_reference
from kernel_core.window_arguments import check_window
from swa_replay import reference
from swa_replay.native import native

_F32, _I32, _I64, _U8 = torch.float32, torch.int32, torch.int64, torch.uint8


def window_attention(
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
    scale: float,
    *,
    block: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each row over the last `window` positions, all heads sharing one latent key.

    Formula: docs/model.md, Attention and Bounded replay.

    The row at position p of request b sees the keys at max(0, lower[b], p - window + 1) to p. Those below
    start_pos[b] are read from the request's ring, the others from `new_rows`, so a chunk may be longer than the ring;
    store it afterwards. Scores are scale · q·k; `sink` joins the denominator only; a key is its own value. The last
    rope_dim channels of the result are turned back by the row's angles. A row without keys gives zeros.

    A row's result depends on nothing but its own keys: not on other rows, the cut into steps, or the threads.

    With `block`, as a draft stage needs it (docs/model.md, Draft stages), every row of a request sees all of the
    request's new rows, later ones too, and the `window` positions before the first of them.

    On an NVIDIA GPU it runs as `mla_fp4.sparse_attention` without selected rows: see there for shapes, rounding and
    what is not checked. With `block` Triton's kernel runs on packed rows; without `mla_fp4`, or without Triton,
    PyTorch's operators do.

    Args:
        q: float32 [T, H, D], rotated; D a multiple of 32. On a GPU bfloat16 too.
        new_rows: uint8 [T, D + D/32] (E4M3 codes, then UE8M0 scales), or float32 [T, D]: this step's rows.
        ring: [S, R, row] of the same kind, R >= window; row p mod R of a slot holds position p.
        ring_slot: int32 [B], each request's slot.
        cu_seqlens: int32 [B + 1]; request b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        start_pos: int64 [B], position of a request's first row.
        lower: int64 [B], positions below are not seen (the start of a replay, else 0).
        window: positions that a row sees, itself included.
        sink: float32 [H], logits that are not scaled; infinite ones are defined (-inf adds nothing, +inf gives zeros).
        rope: float32 [T, rope_dim], cosines, then sines.
        scale: factor of the scores, 1/sqrt(D) for the model.
        block: rows of a request see each other in both directions.
        out: [T, H, D] of q's dtype to write to; must not overlap q.

    Returns:
        [T, H, D] of q's dtype.

    Raises:
        ValueError: a dtype, shape, slot or offset that does not fit; nothing is written then.
        NotImplementedError: the tensors' device has no implementation.
    """
    sizes = check_window(q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, out)
    rows, heads, dim, batch, slots, ring_size, rope_dim, packed = sizes
    if use_reference():
        result = reference.window_attention(
            q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, scale, block=block
        )
        return result if out is None else out.copy_(result)
    if path := elsewhere("swa_replay.window_attention", q, kernels=True, triton=True):
        arguments = (q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, scale)
        return _elsewhere(path, arguments, block, out)
    if out is None:
        out = torch.empty(rows, heads, dim)
    native.window_attention(
        q.data_ptr(),
        new_rows.data_ptr(),
        ring.data_ptr(),
        ring_slot.data_ptr(),
        cu_seqlens.data_ptr(),
        start_pos.data_ptr(),
        lower.data_ptr(),
        sink.data_ptr(),
        rope.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        dim,
        batch,
        slots,
        ring_size,
        window,
        rope_dim,
        scale,
        packed,
        block,
    )
    return out


@cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _elsewhere(path: str, arguments: tuple[Any, ...], block: bool, out: torch.Tensor | None) -> torch.Tensor:
    q, new_rows = arguments[:2]
    dim = q.shape[2]
    # The CUDA kernels know no blocks; Triton's does, on packed rows.
    fits = new_rows.dtype == torch.uint8 and dim >= 64 and dim & (dim - 1) == 0
    blocks_by_triton = path == "cuda" and block and fits and triton_is_there()
    if path == "triton" or blocks_by_triton:
        from swa_replay import triton_attention

        return triton_attention.window_attention(*arguments, block=block, out=out)
    if path == "cuda" and not block:
        from swa_replay import cuda

        result = cuda.window_attention(*arguments, out=out)
        if result is not None:
            return result
    result = reference.window_attention(q.float(), *arguments[1:], block=block, longest=q.shape[0])
    return result.to(q.dtype) if out is None else out.copy_(result)


def store_window(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    floor: torch.Tensor,
) -> None:
    """Copy a step's window rows into the rings, after the attention that still reads what they replace.

    Of each request the rows at positions >= floor[b] are stored, and of those only the last R: row p goes to row
    p mod R of the request's slot. Every other byte of the rings keeps its value.

    Args:
        new_rows: uint8 or float32 [T, row].
        ring: same dtype [S, R, row], changed.
        ring_slot: int32 [B]; requests with rows have distinct slots.
        cu_seqlens, start_pos: int32 [B + 1], int64 [B], as in `window_attention`.
        floor: int64 [B], the lowest position that is stored (0 for all; the start of a decoder tail).

    Raises:
        ValueError: a dtype, shape, slot or offset that does not fit; nothing is written then. On a GPU slots and
            offsets are not checked, as that would wait for the device; of a slot out of range nothing is stored.
        NotImplementedError: the tensors' device has no implementation.
    """
    check.tensor("ring", ring, dtype=(_U8, _F32), shape=(None, None, None))
    slots, ring_size, row = ring.shape
    check.require(ring_size > 0, "ring", list(ring.shape), "at least one row a slot")
    if new_rows.dim() != 2:
        check.tensor("new_rows", new_rows, dtype=ring.dtype, shape=(None, row))
    batch, rows = start_pos.numel(), new_rows.shape[0]
    check.exactly(
        ("new_rows", new_rows, ring.dtype, (rows, row)),
        ("ring_slot", ring_slot, _I32, (batch,)),
        ("cu_seqlens", cu_seqlens, _I32, (batch + 1,)),
        ("start_pos", start_pos, _I64, (batch,)),
        ("floor", floor, _I64, (batch,)),
    )
    if use_reference():
        return reference.store_window(new_rows, ring, ring_slot, cu_seqlens, start_pos, floor)
    if path := elsewhere("swa_replay.store_window", ring, kernels=True):
        from swa_replay import cuda, library

        fits = path == "cuda" and ring_size <= cuda.LARGEST_RING
        store = cuda.store_window if fits else library.store_window
        return store(new_rows, ring, ring_slot, cu_seqlens, start_pos, floor)
    native.store_window(
        new_rows.data_ptr(),
        ring.data_ptr(),
        ring_slot.data_ptr(),
        cu_seqlens.data_ptr(),
        start_pos.data_ptr(),
        floor.data_ptr(),
        rows,
        row * ring.element_size(),
        batch,
        slots,
        ring_size,
    )


register_op(
    "swa_replay",
    "window_attention(Tensor q, Tensor new_rows, Tensor ring, Tensor ring_slot, Tensor cu_seqlens, Tensor start_pos, "
    "Tensor lower, int window, Tensor sink, Tensor rope, float scale, *, bool block=False) -> Tensor",
    window_attention,
    lambda q, *_, **__: torch.empty_like(q),
)
register_op(
    "swa_replay",
    "store_window(Tensor new_rows, Tensor(a!) ring, Tensor ring_slot, Tensor cu_seqlens, Tensor start_pos, "
    "Tensor floor) -> ()",
    store_window,
    lambda *_: None,
)
