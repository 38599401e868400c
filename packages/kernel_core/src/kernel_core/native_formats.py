"""The C++ twins of `kernel_core.formats`: the same names, shapes and bytes, on CPU tensors.

Each function checks its arguments, allocates the result (or fills `out`) and calls the compiled codec of the
instruction set in use. Inputs are contiguous float32 (encoding) or uint8 (decoding).
"""

from __future__ import annotations

import torch

from kernel_core import _native, check
from kernel_core.formats import rows as row

_FLOAT8 = torch.float8_e4m3fn


def quantize_main(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`float32[..., D]` (D a multiple of 16) to main rows `uint8[..., D/2 + D/16]`."""
    count, width = _values("x", x, row.MAIN_GROUP)
    out = _output(out, (*x.shape[:-1], row.main_row_bytes(width)), torch.uint8)
    _native.quantize_main(x.data_ptr(), out.data_ptr(), count, width)
    return out


def dequantize_main(rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Main rows `uint8[..., bytes]` to `float32[..., D]`."""
    count, size = _bytes("rows", rows)
    width = row.main_row_width(size)
    out = _output(out, (*rows.shape[:-1], width), torch.float32)
    _native.dequantize_main(rows.data_ptr(), out.data_ptr(), count, width)
    return out


def quantize_window(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`float32[..., D]` (D a multiple of 32) to window rows `uint8[..., D + D/32]`."""
    count, width = _values("x", x, row.WINDOW_GROUP)
    size = row.window_row_bytes(width)
    out = _output(out, (*x.shape[:-1], size), torch.uint8)
    _native.quantize_mxfp8(x.data_ptr(), out.data_ptr(), out.data_ptr() + width, count, width, size, size)
    return out


def dequantize_window(rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Window rows `uint8[..., bytes]` to `float32[..., D]`."""
    count, size = _bytes("rows", rows)
    width = row.window_row_width(size)
    out = _output(out, (*rows.shape[:-1], width), torch.float32)
    _native.dequantize_mxfp8(rows.data_ptr(), rows.data_ptr() + width, out.data_ptr(), count, width, size, size)
    return out


def quantize_index(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`float32[..., D]` (D a multiple of 32) to index keys `uint8[..., D/2 + D/32]`, codes then scales."""
    count, width = _values("x", x, row.INDEX_GROUP)
    size = row.index_row_bytes(width)
    out = _output(out, (*x.shape[:-1], size), torch.uint8)
    _native.quantize_mxfp4(x.data_ptr(), out.data_ptr(), out.data_ptr() + width // 2, count, width, size, size)
    return out


def dequantize_index(rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Index keys `uint8[..., bytes]`, codes then scales, to `float32[..., D]`."""
    count, size = _bytes("rows", rows)
    width = row.index_row_width(size)
    out = _output(out, (*rows.shape[:-1], width), torch.float32)
    _native.dequantize_mxfp4(rows.data_ptr(), rows.data_ptr() + width // 2, out.data_ptr(), count, width, size, size)
    return out


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`float32[..., i]` (i a multiple of 32) to codes `uint8[..., i/2]` and scales `uint8[..., i/32]`."""
    count, width = _values("weight", weight, row.INDEX_GROUP)
    codes = torch.empty((*weight.shape[:-1], width // 2), dtype=torch.uint8)
    scales = torch.empty((*weight.shape[:-1], width // 32), dtype=torch.uint8)
    _native.quantize_mxfp4(
        weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), count, width, width // 2, width // 32
    )
    return codes, scales


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Codes `uint8 or int8[..., i/2]` and scales `uint8[..., i/32]` to `float32[..., i]`."""
    count, half = _bytes("codes", codes, torch.uint8, torch.int8)
    check.require(half % 16 == 0, "codes", f"shape {list(codes.shape)}", "a last size that is a multiple of 16")
    check.tensor("scales", scales, dtype=torch.uint8, shape=(*codes.shape[:-1], half // 16))
    out = _output(out, (*codes.shape[:-1], half * 2), torch.float32)
    _native.dequantize_mxfp4(codes.data_ptr(), scales.data_ptr(), out.data_ptr(), count, half * 2, half, half // 16)
    return out


def quantize_fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`float32[o, i]` to `float8_e4m3fn[o, i]` and scales `uint8[ceil(o/32), ceil(i/32)]`."""
    check.tensor("weight", weight, dtype=torch.float32, shape=(None, None))
    _on_cpu("weight", weight)
    o, i = weight.shape
    codes = torch.empty((o, i), dtype=_FLOAT8)
    scales = torch.empty((-(-o // 32), -(-i // 32)), dtype=torch.uint8)
    _native.quantize_fp8_block(weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), o, i)
    return codes, scales


def dequantize_fp8_block(
    weight: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`float8_e4m3fn or uint8[o, i]` and scales `uint8[ceil(o/32), ceil(i/32)]` to `float32[o, i]`."""
    check.tensor("weight", weight, dtype=(_FLOAT8, torch.uint8), shape=(None, None))
    _on_cpu("weight", weight)
    o, i = weight.shape
    check.tensor("scales", scales, dtype=torch.uint8, shape=(-(-o // 32), -(-i // 32)))
    out = _output(out, (o, i), torch.float32)
    _native.dequantize_fp8_block(weight.data_ptr(), scales.data_ptr(), out.data_ptr(), o, i)
    return out


def quantize_fp8_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`float32[..., i]` (i a multiple of 32) to `float8_e4m3fn[..., i]` and scales `uint8[..., i/32]`."""
    count, width = _values("table", table, row.WINDOW_GROUP)
    codes = torch.empty(table.shape, dtype=_FLOAT8)
    scales = torch.empty((*table.shape[:-1], width // 32), dtype=torch.uint8)
    _native.quantize_mxfp8(table.data_ptr(), codes.data_ptr(), scales.data_ptr(), count, width, width, width // 32)
    return codes, scales


def dequantize_fp8_rows(table: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`float8_e4m3fn or uint8[..., i]` and scales `uint8[..., i/32]` to `float32[..., i]`."""
    count, width = _bytes("table", table, _FLOAT8, torch.uint8)
    check.require(width % 32 == 0, "table", f"shape {list(table.shape)}", "a last size that is a multiple of 32")
    check.tensor("scales", scales, dtype=torch.uint8, shape=(*table.shape[:-1], width // 32))
    out = _output(out, tuple(table.shape), torch.float32)
    _native.dequantize_mxfp8(table.data_ptr(), scales.data_ptr(), out.data_ptr(), count, width, width, width // 32)
    return out


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """`float32[...]` to codes 0..15, one a byte."""
    return _encode(0, x)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """`float32[...]` to E4M3 bytes."""
    return _encode(1, x)


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """`float32[...]` to the exponent byte of the smallest power of two not below each magnitude."""
    return _encode(2, x)


def _encode(which: int, x: torch.Tensor) -> torch.Tensor:
    check.tensor("x", x, dtype=torch.float32)
    _on_cpu("x", x)
    out = torch.empty(x.shape, dtype=torch.uint8)
    _native.encode_elements(which, x.data_ptr(), out.data_ptr(), x.numel())
    return out


def _on_cpu(argument: str, x: torch.Tensor) -> None:
    check.require(x.device.type == "cpu", argument, f"device {x.device}", "a CPU tensor")


def _values(argument: str, x: torch.Tensor, group: int) -> tuple[int, int]:
    check.tensor(argument, x, dtype=torch.float32)
    _on_cpu(argument, x)
    check.require(
        x.ndim > 0 and x.shape[-1] > 0 and x.shape[-1] % group == 0,
        argument,
        f"shape {list(x.shape)}",
        f"a last size that is a positive multiple of {group}",
    )
    return x.numel() // x.shape[-1], x.shape[-1]


def _bytes(argument: str, x: torch.Tensor, *dtypes: torch.dtype) -> tuple[int, int]:
    check.tensor(argument, x, dtype=dtypes or torch.uint8)
    _on_cpu(argument, x)
    check.require(x.ndim > 0 and x.shape[-1] > 0, argument, f"shape {list(x.shape)}", "a last size above 0")
    return x.numel() // x.shape[-1], x.shape[-1]


def _output(out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype)
    check.tensor("out", out, dtype=dtype, shape=shape)
    _on_cpu("out", out)
    return out
