"""Cache rows: the bytes that every backend, store and wire agree on.

| row | group | values | scale of a group | bytes at width D |
|---|---|---|---|---|
| main | 16 | E2M1, even element in the low nibble | E4M3, amax / 6 | D/2 + D/16 |
| window | 32 | E4M3 | UE8M0, amax / 448 rounded up | D + D/32 |
| index | 32 | E2M1 | UE8M0, amax / 6 rounded up | D/2 + D/32 |

A row holds its values first, then its scales. E2M1 codes round the float32 product with the reciprocal of the
scale, itself rounded to float32. A true division would differ at 42 ties a sign, and for some float32 inputs one
step below a tie.

A floor on amax keeps groups of zeros finite: their scale bytes are 0x01, 105 and 1. An infinity saturates a main
group at 2688 and turns a window or index group into NaN (scale 255). A NaN makes its whole group decode to NaN in
all three: E2M1 codes become 0, E4M3 values 0x7F, and the scale is the NaN of its format.
"""

from __future__ import annotations

import torch

from kernel_core import check
from kernel_core.formats.elements import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_nibbles,
    unpack_nibbles,
)

MAIN_GROUP = 16
WINDOW_GROUP = 32
INDEX_GROUP = 32
MAIN_FLOOR = 6 * 2.0**-9  # the smallest E4M3 scale, 2^-9
WINDOW_FLOOR = 1e-4
INDEX_FLOOR = 6 * 2.0**-126  # the smallest normal scale


def main_row_bytes(width: int) -> int:
    """Bytes of a main row of `width` values (288 at 512)."""
    return width // 2 + width // MAIN_GROUP


def window_row_bytes(width: int) -> int:
    """Bytes of a window row of `width` values (528 at 512)."""
    return width + width // WINDOW_GROUP


def index_row_bytes(width: int) -> int:
    """Bytes of an index key of `width` values (68 at 128)."""
    return width // 2 + width // INDEX_GROUP


def main_row_width(row_bytes: int) -> int:
    """Values in a main row of `row_bytes` bytes: 9 bytes hold 16."""
    check.require(row_bytes > 0 and row_bytes % 9 == 0, "rows", f"{row_bytes} bytes a row", "a multiple of 9 bytes")
    return row_bytes // 9 * 16


def window_row_width(row_bytes: int) -> int:
    """Values in a window row of `row_bytes` bytes: 33 bytes hold 32."""
    check.require(row_bytes > 0 and row_bytes % 33 == 0, "rows", f"{row_bytes} bytes a row", "a multiple of 33 bytes")
    return row_bytes // 33 * 32


def index_row_width(row_bytes: int) -> int:
    """Values in an index key of `row_bytes` bytes: 17 bytes hold 32."""
    check.require(row_bytes > 0 and row_bytes % 17 == 0, "rows", f"{row_bytes} bytes a row", "a multiple of 17 bytes")
    return row_bytes // 17 * 32


def quantize_main(x: torch.Tensor) -> torch.Tensor:
    """`float[..., D]` (D a multiple of 16) to main rows `uint8[..., D/2 + D/16]`."""
    groups = grouped("x", x, MAIN_GROUP)
    scale = encode_e4m3(over(_amax(groups, MAIN_FLOOR), E2M1_MAX))
    codes = encode_e2m1(groups * decode_e4m3(scale).reciprocal().unsqueeze(-1))
    return torch.cat((pack_nibbles(codes.flatten(-2)), scale), dim=-1)


def dequantize_main(rows: torch.Tensor) -> torch.Tensor:
    """Main rows `uint8[..., bytes]` to `float32[..., D]`; every value is exact in bfloat16."""
    width = main_row_width(rows.shape[-1])
    values = decode_e2m1(unpack_nibbles(rows[..., : width // 2].contiguous()))
    return _scaled(values, decode_e4m3(rows[..., width // 2 :].contiguous()), MAIN_GROUP)


def quantize_window(x: torch.Tensor) -> torch.Tensor:
    """`float[..., D]` (D a multiple of 32) to window rows `uint8[..., D + D/32]`."""
    groups = grouped("x", x, WINDOW_GROUP)
    scale = encode_ue8m0(over(_amax(groups, WINDOW_FLOOR), E4M3_MAX))
    codes = encode_e4m3(groups * decode_ue8m0(scale).reciprocal().unsqueeze(-1))
    return torch.cat((codes.flatten(-2), scale), dim=-1)


def dequantize_window(rows: torch.Tensor) -> torch.Tensor:
    """Window rows `uint8[..., bytes]` to `float32[..., D]`; every value is exact in bfloat16."""
    width = window_row_width(rows.shape[-1])
    values = decode_e4m3(rows[..., :width].contiguous())
    return _scaled(values, decode_ue8m0(rows[..., width:].contiguous()), WINDOW_GROUP)


def quantize_index(x: torch.Tensor) -> torch.Tensor:
    """`float[..., D]` (D a multiple of 32) to index keys `uint8[..., D/2 + D/32]`, codes then scales (MXFP4)."""
    groups = grouped("x", x, INDEX_GROUP)
    scale = encode_ue8m0(over(_amax(groups, INDEX_FLOOR), E2M1_MAX))
    codes = encode_e2m1(groups * decode_ue8m0(scale).reciprocal().unsqueeze(-1))
    return torch.cat((pack_nibbles(codes.flatten(-2)), scale), dim=-1)


def dequantize_index(rows: torch.Tensor) -> torch.Tensor:
    """Index keys `uint8[..., bytes]`, codes then scales, to `float32[..., D]`."""
    width = index_row_width(rows.shape[-1])
    values = decode_e2m1(unpack_nibbles(rows[..., : width // 2].contiguous()))
    return _scaled(values, decode_ue8m0(rows[..., width // 2 :].contiguous()), INDEX_GROUP)


def grouped(argument: str, x: torch.Tensor, group: int) -> torch.Tensor:
    """`x` in float32 as `[..., D/group, group]`, after checking that it divides."""
    check.require(x.is_floating_point(), argument, f"dtype {x.dtype}", "a floating dtype")
    check.require(x.ndim > 0 and x.shape[-1] > 0 and x.shape[-1] % group == 0, argument, f"shape {list(x.shape)}",
                  f"a last size that is a positive multiple of {group}")  # fmt: skip
    return x.float().unflatten(-1, (-1, group))


def _amax(groups: torch.Tensor, floor: float) -> torch.Tensor:
    return groups.abs().amax(-1).clamp_min(floor)


def over(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """amax / largest, rounded once. By a tensor, as PyTorch divides CUDA tensors by a number through its reciprocal."""
    return amax / torch.full_like(amax, largest)


def _scaled(values: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    return (values.unflatten(-1, (-1, group)) * scale.unsqueeze(-1)).flatten(-2)
