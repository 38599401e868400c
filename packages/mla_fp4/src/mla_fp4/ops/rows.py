"""Cache rows of 288, 528 and 68 bytes (at the model's widths), and their way into pages."""

from __future__ import annotations

import torch

import mla_fp4.reference.rows as reference
from kernel_core import check, elsewhere, register_op, use_reference
from mla_fp4.native import native
from mla_fp4.ops.norm import check_norm_rope

_F32 = torch.float32

# format -> number in csrc/cpu/rows.hpp, values that share a scale, bytes of d values
_FORMATS = {
    "main": (0, 16, lambda d: d // 2 + d // 16),
    "window": (1, 32, lambda d: d + d // 32),
    "index": (2, 32, lambda d: d // 2 + d // 32),
}
_FLOAT32 = 3


def kv_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor | None,
    *,
    format: str = "main",
    quantize: bool = True,
    round_bf16: bool = False,
) -> torch.Tensor:
    """RMSNorm, RoPE and quantisation of cache rows in one pass.

    Formula: docs/model.md, Cache rows.

    Formats (values, then scales, row-contiguous): "main" E2M1 with an E4M3 scale for 16 values, D/2 + D/16 bytes;
    "window" E4M3 with a UE8M0 scale for 32, D + D/32 bytes; "index" E2M1 with a UE8M0 scale for 32, D/2 + D/32
    bytes. Rotated channels are quantised like the others. The rules are those of `kernel_core.formats`. On an NVIDIA
    GPU the kernel takes 32, 64, 128, 256 and 512 channels; other widths run in PyTorch's operators.

    Args:
        x: float32 [T, D], D a multiple of the format's group.
        weight, eps, rope: as in `norm_rope`; None leaves the norm or the rotation out.
        format: "main", "window" or "index".
        quantize: False returns the float32 rows, for caches without quantisation.
        round_bf16: round to bfloat16 after the norm and after the rotation, as the model was trained.

    Returns:
        uint8 [T, row bytes], or float32 [T, D] with `quantize=False`.

    Raises:
        ValueError: a dtype, shape or format that does not fit.
        NotImplementedError: the tensors' device has no implementation.
    """
    check.tensor("x", x, dtype=_F32, shape=(None, None))
    rows, d = x.shape
    if format not in _FORMATS:
        raise ValueError(f"format: got {format!r}, allowed are 'main', 'window' and 'index'")
    number, group, row_bytes = _FORMATS[format]
    if quantize and (d == 0 or d % group):
        check.require(False, "x", f"{d} channels", f"a multiple of {group} for format '{format}'")
    check_norm_rope(x, weight, eps, rope, d)
    if use_reference():
        return reference.kv_rows(x, weight, eps, rope, format=format, quantize=quantize, round_bf16=round_bf16)
    if path := elsewhere("mla_fp4.kv_rows", x, kernels=True):
        from mla_fp4.cuda import rows as cuda

        if path == "cuda" and cuda.fits_kv_rows(x, weight, rope):
            shape = {"width": row_bytes(d), "dtype": torch.uint8} if quantize else {"width": d, "dtype": _F32}
            kind = number if quantize else _FLOAT32
            return cuda.kv_rows(x, weight, eps, rope, number=kind, round_bf16=round_bf16, **shape)
        return reference.kv_rows(x, weight, eps, rope, format=format, quantize=quantize, round_bf16=round_bf16)
    out = torch.empty(rows, row_bytes(d), dtype=torch.uint8) if quantize else torch.empty(rows, d)
    native.kv_rows(
        x.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if rope is None else rope.data_ptr(),
        out.data_ptr(),
        rows,
        d,
        0 if rope is None else rope.shape[1],
        row_bytes(d) if quantize else d * 4,
        eps,
        number if quantize else _FLOAT32,
        round_bf16,
    )
    return out


def store_main(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows to their slots of row-contiguous pages.

    Args:
        rows: uint8 [T, row bytes] or float32 [T, D].
        pages: [blocks, rows per block, row], of the same dtype; changed.
        slots: int64 [T], block · rows per block + offset; -1 skips the row. Of rows with one slot the last stays, on a
            GPU any of them.

    Raises:
        ValueError: a dtype, shape or slot that does not fit; nothing is written then. On a GPU slots are not checked,
            as that would wait for the device; the kernel skips rows whose slot is out of range.
    """
    check.tensor("rows", rows, dtype=(torch.uint8, _F32), shape=(None, None))
    count, width = rows.shape
    check.tensor("pages", pages, dtype=rows.dtype, shape=(None, None, width))
    check.tensor("slots", slots, dtype=torch.int64, shape=(count,))
    capacity = pages.shape[0] * pages.shape[1]
    if use_reference():
        _check_slots(slots, capacity)
        return reference.store_main(rows, pages, slots)
    size = width * rows.element_size()
    if path := elsewhere("mla_fp4.store_main", pages, kernels=True):
        return _store_elsewhere(path, rows, pages, slots, scale_bytes=0, rows_per_block=0, capacity=capacity)
    return native.store_rows(rows.data_ptr(), pages.data_ptr(), slots.data_ptr(), count, size, capacity)


def store_index(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rows_per_block: int) -> None:
    """Write index keys to their slots; a packed page holds the codes of all its rows, then their scales.

    Args:
        rows: uint8 [T, D/2 + D/32] of `kv_rows(format="index")`, or float32 [T, D].
        pages: uint8 [blocks, rows_per_block · row bytes] or float32 [blocks, rows_per_block, D]; changed.
        slots: int64 [T], block · rows_per_block + offset; -1 skips the row. Of rows with one slot the last stays, on a
            GPU any of them.
        rows_per_block: keys in a page.

    Raises:
        ValueError: a dtype, shape or slot that does not fit; nothing is written then. On a GPU slots are not checked,
            as in `store_main`.
    """
    check.tensor("rows", rows, dtype=(torch.uint8, _F32), shape=(None, None))
    check.require(rows_per_block > 0, "rows_per_block", rows_per_block, "a positive number")
    count, width = rows.shape
    if rows.dtype == _F32:
        check.tensor("pages", pages, dtype=_F32, shape=(None, rows_per_block, width))
        return store_main(rows, pages, slots)
    if width == 0 or width % 17:
        check.require(False, "rows", f"{width} bytes a row", "a multiple of 17 bytes")
    check.tensor("pages", pages, dtype=torch.uint8, shape=(None, rows_per_block * width))
    check.tensor("slots", slots, dtype=torch.int64, shape=(count,))
    if use_reference():
        _check_slots(slots, pages.shape[0] * rows_per_block)
        return reference.store_index(rows, pages, slots, rows_per_block)
    scales = width // 17
    if path := elsewhere("mla_fp4.store_index", pages, kernels=True):
        capacity = pages.shape[0] * rows_per_block
        return _store_elsewhere(
            path, rows, pages, slots, scale_bytes=scales, rows_per_block=rows_per_block, capacity=capacity
        )
    return native.store_split_rows(
        rows.data_ptr(),
        pages.data_ptr(),
        slots.data_ptr(),
        count,
        width - scales,
        scales,
        rows_per_block,
        pages.shape[0],
    )


def _store_elsewhere(
    path: str,
    rows: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale_bytes: int,
    rows_per_block: int,
    capacity: int,
) -> None:
    from mla_fp4 import library
    from mla_fp4.cuda import rows as cuda

    if path == "cuda":
        size = rows.shape[1] * rows.element_size()
        return cuda.store_rows(
            rows, pages, slots, code_bytes=size - scale_bytes, scale_bytes=scale_bytes, rows_per_block=rows_per_block,
            capacity=capacity,
        )  # fmt: skip
    if rows_per_block:
        return library.store_index(rows, pages, slots, rows_per_block)
    return library.store_rows(rows, pages, slots)


def _check_slots(slots: torch.Tensor, capacity: int) -> None:
    wrong = ((slots < -1) | (slots >= capacity)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"slots[{i}]: got {int(slots[i])}, allowed is -1 to {capacity - 1}")


def _kv_rows_fake(x, weight, eps, rope, *, format="main", quantize=True, round_bf16=False):
    if not quantize:
        return torch.empty_like(x)
    return x.new_empty(x.shape[0], _FORMATS[format][2](x.shape[1]), dtype=torch.uint8)


register_op(
    "mla_fp4",
    "kv_rows(Tensor x, Tensor? weight, float eps, Tensor? rope, *, str format='main', bool quantize=True, "
    "bool round_bf16=False) -> Tensor",
    kv_rows,
    _kv_rows_fake,
)
register_op("mla_fp4", "store_main(Tensor rows, Tensor(a!) pages, Tensor slots) -> ()", store_main, lambda *a: None)
register_op(
    "mla_fp4",
    "store_index(Tensor rows, Tensor(a!) pages, Tensor slots, int rows_per_block) -> ()",
    store_index,
    lambda *a: None,
)
