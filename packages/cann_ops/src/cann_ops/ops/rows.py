"""RMSNorm, rotation and quantisation, and rows to their slots."""

from __future__ import annotations

import torch

from cann_ops.kernels import Kernel
from cann_ops.launch import launch, place
from cann_ops.reference import rows as reference
from kernel_core import check, formats

_F32, _I32, _I64, _U8 = torch.float32, torch.int32, torch.int64, torch.uint8
_BYTES = {"main": formats.main_row_bytes, "window": formats.window_row_bytes, "index": formats.index_row_bytes}
_ROPE = 64
MOST_SLOTS = 2**31 - 1


def kv_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor | None,
    *,
    format: str = "main",
    round_bf16: bool = False,
) -> torch.Tensor:
    """RMSNorm, RoPE and quantisation of cache rows in one pass; `mla_fp4.kv_rows` says what each step means.

    Args:
        x: float32 [T, D], D 128, 256 or 512.
        weight: float32 [D], or None for no norm.
        eps: added to the mean square.
        rope: float32 [T, 64], cosines, then sines, or None for no rotation.
        format: "main", "window" or "index".
        round_bf16: round to bfloat16 after the norm and after the rotation.

    Returns:
        uint8 [T, row bytes]. A row depends on itself alone.

    Raises:
        ValueError: an argument that does not fit.
        CannUnavailableError: there is no NPU, and nothing else was asked for.
    """
    check.tensor("x", x, dtype=_F32, shape=(None, None))
    rows, d = x.shape
    if format not in _BYTES:
        raise ValueError(f"format: got {format!r}, allowed are 'main', 'window' and 'index'")
    check.require(d in (128, 256, 512), "x", f"{d} channels", "128, 256 or 512")
    if weight is not None:
        check.tensor("weight", weight, dtype=_F32, shape=(d,))
        check.require(eps > 0, "eps", eps, "a positive number")
    if rope is not None:
        check.tensor("rope", rope, dtype=_F32, shape=(rows, _ROPE))
    if place("cann_ops.kv_rows", x) == "reference":
        return reference.kv_rows(x, weight, eps, rope, format=format, round_bf16=round_bf16)
    out = x.new_empty(rows, _BYTES[format](d), dtype=_U8)
    if rows == 0:
        return out
    kernel = Kernel.of(
        "kv_rows", format=format, D=d, norm=weight is not None, rope=rope is not None, round_bf16=round_bf16
    )
    given = {"x": x, "rows": out} | ({} if weight is None else {"weight": weight})
    launch(kernel, given | ({} if rope is None else {"turns": rope}), written=["rows"], scalars={"eps": eps})
    return out


def norm_quantize(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm and quantisation of wide rows to MXFP8, the input of `mx_linear`.

    Args:
        x: float32 [T, D], D a multiple of 1024 up to 8192.
        weight: float32 [D], or None for no norm.
        eps: added to the mean square.

    Returns:
        codes float8_e4m3fn [T, D] and scales uint8 [T, D / 32], by the rule of window rows.

    Raises ValueError and CannUnavailableError as `kv_rows`.
    """
    check.tensor("x", x, dtype=_F32, shape=(None, None))
    rows, d = x.shape
    check.require(d % 1024 == 0 and 1024 <= d <= 8192, "x", f"{d} columns", "a multiple of 1024 up to 8192")
    if weight is not None:
        check.tensor("weight", weight, dtype=_F32, shape=(d,))
        check.require(eps > 0, "eps", eps, "a positive number")
    if place("cann_ops.norm_quantize", x) == "reference":
        return reference.norm_quantize(x, weight, eps)
    codes, scales = x.new_empty(rows, d, dtype=_U8), x.new_empty(rows, d // 32, dtype=_U8)
    if rows:
        given = {"x": x, "codes": codes, "scales": scales} | ({} if weight is None else {"weight": weight})
        kernel = Kernel.of("norm_quantize", D=d, norm=weight is not None)
        launch(kernel, given, written=["codes", "scales"], scalars={"eps": eps})
    return codes.view(torch.float8_e4m3fn), scales


def store_main(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows to their slots of row-contiguous pages.

    Args:
        rows: uint8 [T, row bytes].
        pages: uint8 [blocks, rows per block, row bytes], changed; up to 2^31 - 1 rows.
        slots: int64 [T], block · rows per block + offset; -1 skips the row. Other values out of range are skipped on
            an NPU, as looking at them would wait for the device. Of rows with one slot any may stay.

    Raises ValueError before anything is written, and CannUnavailableError as `kv_rows`.
    """
    check.tensor("rows", rows, dtype=_U8, shape=(None, None))
    count, width = rows.shape
    check.tensor("pages", pages, dtype=_U8, shape=(None, None, width))
    check.tensor("slots", slots, dtype=_I64, shape=(count,))
    _store("cann_ops.store_main", rows, pages.flatten(1), slots, width, 0, pages.shape[1])


def store_index(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rows_per_block: int) -> None:
    """Write index keys to their slots; a page holds the codes of all its rows, then their scales.

    Args:
        rows: uint8 [T, 68], of `kv_rows(format="index")` at 128 channels; in general multiples of 34 bytes.
        pages: uint8 [blocks, rows_per_block · row bytes], changed.
        slots: as in `store_main`.
        rows_per_block: keys in a page.
    """
    check.tensor("rows", rows, dtype=_U8, shape=(None, None))
    count, width = rows.shape
    check.require(rows_per_block > 0, "rows_per_block", rows_per_block, "a positive number")
    check.require(width > 0 and width % 34 == 0, "rows", f"{width} bytes a row", "a multiple of 34 bytes")
    check.tensor("pages", pages, dtype=_U8, shape=(None, rows_per_block * width))
    check.tensor("slots", slots, dtype=_I64, shape=(count,))
    _store("cann_ops.store_index", rows, pages, slots, width - width // 17, width // 17, rows_per_block)


def store_window(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    floor: torch.Tensor,
) -> None:
    """Copy a step's window rows into the rings, after the attention that still reads what they replace.

    Of each request the rows at positions >= floor[b] are stored, and of those only the last R: row p goes to row p mod
    R of the request's slot. Every other byte of the rings keeps its value.

    Args:
        new_rows: uint8 [T, row].
        ring: uint8 [S, R, row], changed.
        ring_slot: int32 [B]; requests with rows have distinct slots; of a slot out of range nothing is stored.
        cu_seqlens, start_pos: int32 [B + 1], int64 [B], as in `window_attention`.
        floor: int64 [B], the lowest position that is stored.
    """
    check.tensor("ring", ring, dtype=_U8, shape=(None, None, None))
    _, ring_size, row = ring.shape
    check.require(ring_size > 0, "ring", list(ring.shape), "at least one row a slot")
    check.tensor("new_rows", new_rows, dtype=_U8, shape=(None, row))
    batch, rows = start_pos.numel(), new_rows.shape[0]
    check.exactly(
        ("ring_slot", ring_slot, _I32, (batch,)),
        ("cu_seqlens", cu_seqlens, _I32, (batch + 1,)),
        ("start_pos", start_pos, _I64, (batch,)),
        ("floor", floor, _I64, (batch,)),
    )
    if batch == 0 or rows == 0:
        return
    slots = reference.window_slots(cu_seqlens, start_pos, floor, ring_slot, ring_size, rows)
    _store("cann_ops.store_window", new_rows, ring.flatten(1), slots, row, 0, ring_size)


def _store(
    op: str, rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, codes: int, scales: int, rows_per_block: int
) -> None:
    capacity = pages.shape[0] * rows_per_block
    check.require(capacity <= MOST_SLOTS, "pages", f"{capacity} rows", f"up to {MOST_SLOTS}")
    if place(op, rows) == "reference":
        wrong = ((slots < -1) | (slots >= capacity)).nonzero()
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(f"slots[{i}]: got {int(slots[i])}, allowed is -1 to {capacity - 1}")
        if scales:
            return reference.store_index(rows, pages, slots, rows_per_block)
        return reference.store_main(rows, pages.view(-1, rows_per_block, codes), slots)
    if len(rows) == 0 or capacity == 0:
        return None
    kernel = Kernel.of("store_rows", code_bytes=codes, scale_bytes=scales, rows_per_block=rows_per_block)
    in_range = torch.where((slots < 0) | (slots >= capacity), -1, slots).int()
    return launch(kernel, {"rows": rows, "slots": in_range, "pages": pages}, written=[])
