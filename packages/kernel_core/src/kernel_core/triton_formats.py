"""Stored formats and ragged rows for Triton kernels: bytes in, float32 values out.

Integer arithmetic only, so that Triton's interpreter and every GPU agree to the bit. A row is read as its even and its
odd channels, since an E2M1 byte holds one of each. Import it where Triton is needed: a CPU machine has none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def power_of_two(exponent):
    """2^exponent in float32 for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """Values of E4M3 bytes (int32)."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (8 + mantissa).to(tl.float32) * power_of_two(exponent - 10)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where((byte & 127) == 127, float("nan"), value)
    return tl.where(byte >= 128, -value, value)


@triton.jit
def e2m1(code):
    """Values of E2M1 codes (int32, 0 to 15)."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    value = tl.where(exponent == 0, mantissa * 0.5, (1.0 + 0.5 * mantissa) * power_of_two(exponent - 1))
    return tl.where(code >= 8, -value, value)


@triton.jit
def ue8m0(byte):
    """Values of UE8M0 bytes (int32)."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def window_rows(row, known, HALF: tl.constexpr):
    """Even and odd channels of the window rows that `row`, pointers [keys], point to; zeros where not known."""
    i = tl.arange(0, HALF)
    mask = known[:, None]
    even = tl.load(row[:, None] + 2 * i[None, :], mask=mask, other=0).to(tl.int32)
    odd = tl.load(row[:, None] + 2 * i[None, :] + 1, mask=mask, other=0).to(tl.int32)
    scale = ue8m0(tl.load(row[:, None] + 2 * HALF + (i // 16)[None, :], mask=mask, other=0).to(tl.int32))
    return tl.where(mask, e4m3(even) * scale, 0.0), tl.where(mask, e4m3(odd) * scale, 0.0)


@triton.jit
def main_rows(row, known, HALF: tl.constexpr):
    """The same of main rows."""
    i = tl.arange(0, HALF)
    mask = known[:, None]
    byte = tl.load(row[:, None] + i[None, :], mask=mask, other=0).to(tl.int32)
    scale = e4m3(tl.load(row[:, None] + HALF + (i // 8)[None, :], mask=mask, other=0).to(tl.int32))
    return tl.where(mask, e2m1(byte & 15) * scale, 0.0), tl.where(mask, e2m1(byte >> 4) * scale, 0.0)


def owners(cu_seqlens: torch.Tensor, start_pos: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of every row, int64 [T], without asking the device anything."""
    row = torch.arange(rows, device=cu_seqlens.device)
    owner = torch.searchsorted(cu_seqlens[1:].long(), row, right=True)
    return owner, start_pos[owner] + row - cu_seqlens[owner].long()
