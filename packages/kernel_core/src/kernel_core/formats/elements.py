"""One element at a time: E2M1, E4M3 ("fn": no infinities) and UE8M0, to and from float32.

Source of the element formats: OCP Microscaling Formats (MX) specification 1.0. Rounding is to nearest, ties to the
even code. The sign of an input is kept when its magnitude rounds to zero.
"""

from __future__ import annotations

import torch

from kernel_core import check

E2M1_MAX = 6.0
E4M3_MAX = 448.0
# Midpoints between neighbouring magnitudes; a tie goes down where the lower code is even.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8, shape of `x`, one a byte, bit 3 the sign). Saturates at 6; NaN has no code and gives 0."""
    x = x.float()
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for tie in _TIES_DOWN:
        code += magnitude > tie
    for tie in _TIES_UP:
        code += magnitude >= tie
    return code | ((torch.signbit(x) & ~x.isnan()).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Values (float32) of codes 0..15 (uint8); bits above the fourth are ignored."""
    _bytes("codes", codes, torch.uint8)
    return _e2m1_table(codes.device)[(codes & 15).int()]


def _e2m1_table(device: torch.device) -> torch.Tensor:
    """The 16 values, made on the device: a copy from the host could not be part of a CUDA graph."""
    code = torch.arange(16, device=device)
    magnitude = code & 7
    twice = torch.where(magnitude < 4, magnitude, (2 + (magnitude & 1)) << ((magnitude >> 1) - 1).clamp(min=0))
    value = twice.float() * 0.5
    return torch.where(code < 8, value, -value)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """`uint8[..., n]` codes 0..15 to `uint8[..., n/2]` bytes, even element in the low nibble."""
    check.require(codes.shape[-1] % 2 == 0, "codes", f"last size {codes.shape[-1]}", "an even number")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`: `uint8[..., n/2]` to `uint8[..., n]`. Accepts int8 bytes of a checkpoint too."""
    _bytes("packed", packed, torch.uint8, torch.int8)
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes (uint8, shape of `x`). Saturates at 448, infinities too; every NaN gives 0x7F."""
    x = x.float()
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(code, 0x7F), code)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Values (float32) of E4M3 bytes (uint8 or float8_e4m3fn); 0x7F and 0xFF are NaN."""
    _bytes("codes", codes, torch.uint8, torch.float8_e4m3fn)
    return codes.view(torch.float8_e4m3fn).float()


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two not below `x`, as exponent + 127 (uint8), read from the float32 bits.

    For positive normal `x` this is ceil(log2 x) + 127 without a logarithm. Zero and subnormals give 0 or 1;
    infinities and NaN give 255, the NaN of this format. The sign is ignored.
    """
    bits = x.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    return (exponent + ((bits & 0x7FFFFF) != 0)).clamp(max=255).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) in float32 (uint8 or float8_e8m0fnu codes); 0 is the subnormal 2^-127, 255 is NaN."""
    _bytes("codes", codes, torch.uint8, torch.float8_e8m0fnu)
    code = codes.view(torch.uint8).to(torch.int32)
    bits = torch.where(code == 0, torch.full_like(code, 0x00400000), code << 23)
    return torch.where(code == 255, torch.full_like(code, 0x7FC00000), bits).view(torch.float32)


def _bytes(argument: str, codes: torch.Tensor, *allowed: torch.dtype) -> None:
    """A wider dtype would be reinterpreted or cast in silence, which ends in wrong scales far from here."""
    check.require(codes.dtype in allowed, argument, f"dtype {codes.dtype}", " or ".join(map(str, allowed)))
