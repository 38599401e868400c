"""Packed weights: MXFP4 experts, FP8 linears with a scale for 32x32 values, FP8 rows of the Engram tables.

Scales are UE8M0 bytes held as uint8. Reading follows the checkpoint; writing uses the rules of the cache rows
(amax floor 6*2^-126 for E2M1, 1e-4 for E4M3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernel_core import check
from kernel_core.formats.elements import (
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    encode_ue8m0,
    unpack_nibbles,
)
from kernel_core.formats.rows import WINDOW_FLOOR, index_row_bytes, over, quantize_index, quantize_window

BLOCK = 32


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`float[..., o, i]` (i a multiple of 32) to codes `uint8[..., o, i/2]` and scales `uint8[..., o, i/32]`."""
    width = weight.shape[-1]
    rows = quantize_index(weight)
    return rows[..., : width // 2].contiguous(), rows[..., width // 2 : index_row_bytes(width)].contiguous()


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes `uint8 or int8[..., o, i/2]` and scales `uint8[..., o, i/32]` to `float32[..., o, i]`."""
    check.require(codes.shape[:-1] == scales.shape[:-1] and codes.shape[-1] == 16 * scales.shape[-1], "scales",
                  f"shape {list(scales.shape)}", f"one byte for 16 code bytes of {list(codes.shape)}")  # fmt: skip
    values = decode_e2m1(unpack_nibbles(codes)).unflatten(-1, (-1, BLOCK))
    return (values * decode_ue8m0(scales).unsqueeze(-1)).flatten(-2)


def quantize_fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`float[o, i]` to `float8_e4m3fn[o, i]` and scales `uint8[ceil(o/32), ceil(i/32)]`; any size, edge blocks too."""
    check.require(weight.ndim == 2 and weight.is_floating_point(), "weight", f"{weight.dtype}{list(weight.shape)}",
                  "a floating matrix [o, i]")  # fmt: skip
    o, i = weight.shape
    blocks = F.pad(weight.float(), (0, -i % BLOCK, 0, -o % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = encode_ue8m0(over(blocks.abs().amax((1, 3)).clamp_min(WINDOW_FLOOR), E4M3_MAX))
    codes = encode_e4m3(weight.float() * _spread(decode_ue8m0(scales).reciprocal(), o, i))
    return codes.view(torch.float8_e4m3fn), scales


def dequantize_fp8_block(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`float8_e4m3fn (or its uint8 bytes)[o, i]` and `uint8[ceil(o/32), ceil(i/32)]` to `float32[o, i]`."""
    o, i = weight.shape
    wanted = (-(-o // BLOCK), -(-i // BLOCK))
    check.require(tuple(scales.shape) == wanted, "scales", f"shape {list(scales.shape)}", f"{list(wanted)}")
    return decode_e4m3(weight) * _spread(decode_ue8m0(scales), o, i)


def quantize_fp8_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`float[..., i]` (i a multiple of 32) to `float8_e4m3fn[..., i]` and `uint8[..., i/32]`, a scale a row segment."""
    width = table.shape[-1]
    rows = quantize_window(table)
    return rows[..., :width].contiguous().view(torch.float8_e4m3fn), rows[..., width:].contiguous()


def dequantize_fp8_rows(table: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`float8_e4m3fn (or uint8)[..., i]` and scales `uint8[..., i/32]` to `float32[..., i]`."""
    check.require(table.shape[:-1] == scales.shape[:-1] and table.shape[-1] == BLOCK * scales.shape[-1], "scales",
                  f"shape {list(scales.shape)}", f"one byte for 32 values of {list(table.shape)}")  # fmt: skip
    return (decode_e4m3(table).unflatten(-1, (-1, BLOCK)) * decode_ue8m0(scales).unsqueeze(-1)).flatten(-2)


def _spread(scale: torch.Tensor, o: int, i: int) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK, 0)[:o].repeat_interleave(BLOCK, 1)[:, :i]
