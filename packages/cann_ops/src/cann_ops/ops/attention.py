"""Attention over window rows and selected compressed rows, with one softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cann_ops.kernels import Kernel
from cann_ops.launch import launch, place
from cann_ops.reference import attention as reference
from kernel_core import check
from kernel_core.window_arguments import check_window

_I32 = torch.int32
_DIM, _ROPE, _KEYS, _PITCH = 512, 64, 64, 544
_WINDOW_ROW, _MAIN_ROW = 528, 288
_HEADS = (32, 64)
MOST_ROWS = 2**31 - 1


def sparse_attention(
    q: torch.Tensor,
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    pages: torch.Tensor,
    rows_per_block: int,
    block_table: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax over window rows and selected compressed rows; `mla_fp4.sparse_attention` says what is computed.

    The kernel takes packed rows of 512 channels, 64 of them rotated, and any number of heads (in groups of 64, padded
    to 32 or 64). It rounds q, the softmax weights and the result to bfloat16 and sums in float32. A row's result
    depends on its own keys alone, and is not split over cores.

    Args:
        q: float32 [T, H, 512], rotated; bfloat16 too on an NPU.
        new_rows: uint8 [T, 528]; ring: uint8 [S, R, 528], R >= window; ring_slot: int32 [B].
        cu_seqlens: int32 [B + 1]; start_pos, lower: int64 [B]; window: positions that a row sees.
        pages: uint8 [NB, rows_per_block, 288]; block_table: int32 [B, M]; indices: int32 [T, K], -1 selects nothing.
        sink: float32 [H]; rope: float32 [T, 64]; scale: factor of the scores.
        out: [T, H, 512] of q's dtype to write to.

    Returns:
        [T, H, 512] of q's dtype.

    Raises:
        ValueError: a dtype or shape that does not fit. Slots, indices and blocks are not looked at: that would wait for
            the device, and wrong ones read wrong rows.
        NotImplementedError: rows that are not packed, or of other widths.
        CannUnavailableError: there is no NPU, and nothing else was asked for.
    """
    _check(q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, out)
    check.require(rows_per_block > 0, "rows_per_block", rows_per_block, "1 or more")
    check.tensor("block_table", block_table, dtype=_I32, shape=(start_pos.shape[0], None))
    check.tensor("indices", indices, dtype=_I32, shape=(q.shape[0], None))
    check.tensor("pages", pages, dtype=torch.uint8, shape=(None, rows_per_block, _MAIN_ROW))
    check.require(pages.shape[0] * rows_per_block <= MOST_ROWS, "pages", list(pages.shape), f"up to {MOST_ROWS} rows")
    arguments = (q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window)
    if place("cann_ops.sparse_attention", q) == "reference":
        result = reference.sparse_attention(*arguments, pages, rows_per_block, block_table, indices, sink, rope, scale)
        return result if out is None else out.copy_(result)
    far = reference.page_rows(cu_seqlens, start_pos, block_table, rows_per_block, indices)
    return _run(arguments, far, pages.view(-1, _MAIN_ROW), sink, rope, scale, out)


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
    """Attention of each row over its last `window` positions: `sparse_attention` without selected rows.

    Arguments, result and errors as there; `block`, which draft stages use, has no kernel here (NotImplementedError).
    """
    if block:
        raise NotImplementedError("cann_ops.window_attention has no kernel for block=True; what exists: block=False")
    _check(q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, out)
    arguments = (q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window)
    if place("cann_ops.window_attention", q) == "reference":
        result = reference.window_attention(*arguments, sink, rope, scale)
        return result if out is None else out.copy_(result)
    return _run(arguments, None, None, sink, rope, scale, out)


def gather_window(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """The window rows of each new row, oldest first, bytes as stored: uint8 [T, window, row], zeros behind them.

    What the row at position p sees: positions max(0, lower[b], p - window + 1) to p, those below start_pos[b] from the
    ring, the rest from `new_rows` (uint8 [T, row]). Other arguments and errors as in `window_attention`. The attention
    kernels gather for themselves; this is for what wants the rows side by side.
    """
    check.tensor("ring", ring, dtype=torch.uint8, shape=(None, None, None))
    slots, ring_size, row = ring.shape
    check.require(1 <= row <= 2048, "ring", f"{row} bytes a row", "1 to 2048")
    check.tensor("new_rows", new_rows, dtype=torch.uint8, shape=(None, row))
    check.require(0 < window <= ring_size, "window", window, f"1 to {ring_size}, the rows of a ring")
    rows, requests = new_rows.shape[0], start_pos.numel()
    check.exactly(
        ("ring_slot", ring_slot, _I32, (requests,)),
        ("cu_seqlens", cu_seqlens, _I32, (requests + 1,)),
        ("start_pos", start_pos, torch.int64, (requests,)),
        ("lower", lower, torch.int64, (requests,)),
    )
    where = place("cann_ops.gather_window", ring)
    if rows == 0:
        return new_rows.new_zeros(0, window, row)
    near = reference.near_rows(cu_seqlens, start_pos, lower, window, ring_slot, (slots, ring_size), rows)
    flat = torch.cat((ring.view(-1, row), new_rows))
    check.require(len(flat) <= MOST_ROWS, "ring", list(ring.shape), f"up to {MOST_ROWS} rows")
    if where == "reference":
        return flat[near.clamp(min=0)].masked_fill((near < 0)[..., None], 0)
    out = new_rows.new_empty(rows, window, row)
    given = {"rows": flat, "places": near.flatten().int(), "nothing": new_rows.new_zeros(row)}
    given["out"] = out.view(-1, row)
    launch(Kernel.of("gather_rows", row=row), given, written=["out"])
    return out


def _check(q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, out) -> None:
    if q.dim() == 3 and (new_rows.dtype != torch.uint8 or q.shape[2] != _DIM or rope.shape[-1] != _ROPE):
        raise NotImplementedError(
            f"cann_ops attention: got {new_rows.dtype} rows of {q.shape[2]} channels, {rope.shape[-1]} of them turned; "
            f"what exists: uint8 rows of {_DIM} channels, {_ROPE} of them turned"
        )
    check_window(q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, sink, rope, out)


def _run(arguments, far, pages, sink, rope, scale, out) -> torch.Tensor:
    q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window = arguments
    rows, heads, _ = q.shape
    slots, ring_size, _ = ring.shape
    if rows == 0 or heads == 0:
        return torch.empty_like(q) if out is None else out
    check.require(slots * ring_size + rows <= MOST_ROWS, "ring", list(ring.shape), f"up to {MOST_ROWS} rows")
    near = reference.near_rows(cu_seqlens, start_pos, lower, window, ring_slot, (slots, ring_size), rows)
    near, near_steps = _steps(near)
    steps = _needed(near)
    if far is None or far.shape[1] == 0:
        far, far_steps = near.new_full((rows, _KEYS), -1), 0
        pages = new_rows.new_zeros(1, _MAIN_ROW)
    else:
        far, far_steps = _steps(far)
        more = _needed(far)
        steps = torch.where(more > 0, near_steps + more, steps)
    kernel_of = {"near_steps": near_steps, "far_steps": far_steps}
    shared = {
        "ring": ring.view(-1, _WINDOW_ROW),
        "new_rows": new_rows,
        "pages": pages,
        "nothing": new_rows.new_zeros(_PITCH),
        "near": near,
        "far": far,
        "steps": steps.int(),
        "turns": rope,
    }
    result = torch.empty_like(q) if out is None else out
    for first in range(0, heads, _HEADS[-1]):
        here = min(_HEADS[-1], heads - first)
        padded = next(size for size in _HEADS if size >= here)
        part = F.pad(q[:, first : first + here].to(torch.bfloat16), (0, 0, 0, padded - here)).contiguous()
        pull = F.pad(sink[first : first + here], (0, padded - here), value=-torch.inf).contiguous()
        made = torch.empty_like(part)
        given = shared | {"q": part, "sink": pull, "out": made}
        launch(
            Kernel.of("latent_attention", heads=padded, **kernel_of), given, written=["out"], scalars={"scale": scale}
        )
        result[:, first : first + here] = made[:, :here]
    return result


def _steps(places: torch.Tensor) -> tuple[torch.Tensor, int]:
    """int32 places, padded by -1 to whole steps, and the number of steps."""
    steps = -(-places.shape[1] // _KEYS)
    return F.pad(places, (0, steps * _KEYS - places.shape[1]), value=-1).int().contiguous(), steps


def _needed(places: torch.Tensor) -> torch.Tensor:
    """Steps up to the last place of each row that names a key, int64 [T]."""
    at = torch.arange(1, places.shape[1] + 1, device=places.device)
    return -(-torch.where(places >= 0, at, 0).amax(1) // _KEYS)
