"""The device's decoders and encoders, run on the host: every code under every scale, every tie."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from kernel_core import formats
from kernel_core.testing.host import address, host_library

MAIN, WINDOW, INDEX = 0, 1, 2
QUANTIZE = (formats.quantize_main, formats.quantize_window, formats.quantize_index)


@pytest.fixture(scope="module")
def lib(tmp_path_factory) -> ctypes.CDLL:
    return host_library(Path(__file__).parent / "host" / "formats.cpp", tmp_path_factory.mktemp("formats"))


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n], element 0 in the lowest bits, of uint8 codes [n, 32 / bits]."""
    shifts = torch.arange(codes.shape[1]) * bits
    return (codes.long() << shifts).sum(1).to(torch.int32)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, signs of zeros included; any NaN equals any other."""
    actual, expected = actual.bfloat16(), expected.bfloat16()
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


def every_pair(codes: int) -> tuple[torch.Tensor, torch.Tensor]:
    code, scale = torch.meshgrid(torch.arange(codes), torch.arange(256), indexing="ij")
    return code.flatten().to(torch.uint8), scale.flatten().to(torch.uint8)


def unpacked(lib, name: str, code: torch.Tensor, scale: torch.Tensor, lanes: int, flag: int):
    """Decode words whose elements are the code and its successors, so that each code visits each place."""
    count = 16 if lanes == 8 else 256
    codes = (code.long()[:, None] + torch.arange(lanes)).remainder(count).to(torch.uint8)
    out = torch.empty(len(code), lanes, dtype=torch.bfloat16)
    packed = words(codes, 32 // lanes)
    getattr(lib, name)(address(packed), address(scale), flag, address(out), ctypes.c_int64(len(code)))
    return codes, out


@pytest.mark.parametrize("ue8m0", [0, 1])
def test_e2m1_under_every_scale(lib, ue8m0):
    code, scale = every_pair(16)
    codes, out = unpacked(lib, "decode_e2m1x8", code, scale, 8, ue8m0)
    factor = (formats.decode_ue8m0 if ue8m0 else formats.decode_e4m3)(scale)
    exact = formats.decode_e2m1(codes) * factor[:, None]
    if not ue8m0:  # nothing was rounded
        assert torch.equal(exact.bfloat16().float()[~exact.isnan()], exact[~exact.isnan()])
    same(out, exact)


def test_e2m1_pairs_of_every_byte(lib):
    byte, scale = every_pair(256)
    out = torch.empty(len(byte), 2, dtype=torch.bfloat16)
    lib.decode_e2m1x2(address(byte), address(scale), address(out), ctypes.c_int64(len(byte)))
    same(out, formats.decode_e2m1(formats.unpack_nibbles(byte[:, None])) * formats.decode_e4m3(scale)[:, None])


def test_small_e2m1_pairs(lib):
    """Every code at each of the eight places beside every other: 2^-126 of its value, subnormals and signs included."""
    place, code, others = torch.meshgrid(torch.arange(8), torch.arange(16), torch.arange(16), indexing="ij")
    place, code, others = place.flatten(), code.flatten(), others.flatten()
    codes = others[:, None].repeat(1, 8)
    codes[torch.arange(len(code)), place] = code
    packed, out = words(codes.to(torch.uint8), 4), torch.empty(len(code), 8, dtype=torch.bfloat16)
    lib.decode_e2m1x8_small(address(packed), address(out), ctypes.c_int64(len(code)))
    same(out.double() * 2.0**126, formats.decode_e2m1(codes.to(torch.uint8)))


def test_large_pairs_of_e4m3_scales(lib):
    """All 65536 pairs: 2^118 times their values, each NaN in its own half, and either half twice."""
    pairs = torch.arange(65536).to(torch.uint16)
    out = torch.empty(65536, 3, 2, dtype=torch.bfloat16)
    lib.decode_scale_pairs(address(pairs), address(out), ctypes.c_int64(65536))
    scales = formats.decode_e4m3(pairs.view(torch.uint8).view(-1, 2))
    same(out[:, 0].double() * 2.0**-118, scales)
    same(out[:, 1], out[:, 0, :1].expand(-1, 2))
    same(out[:, 2], out[:, 0, 1:].expand(-1, 2))


def test_floor_of_the_logarithm(lib):
    powers = 2 ** torch.arange(32)
    x = torch.cat([torch.arange(1, 1 << 16), powers, powers[1:] - 1, powers[1:] + 1, torch.tensor([2**32 - 1])])
    given, out = x.to(torch.uint32), torch.empty(len(x), dtype=torch.int32)
    lib.floor_log2s(address(given), address(out), ctypes.c_int64(len(x)))
    assert out.tolist() == [n.bit_length() - 1 for n in x.tolist()]


def test_e2m1_is_a_part_of_e4m3(lib):
    low = torch.arange(65536)
    word = (low | (low.flip(0) << 16)).to(torch.int32)
    out = torch.empty(len(word), 8, dtype=torch.uint8)
    lib.e2m1_to_e4m3(address(word), address(out), ctypes.c_int64(len(word)))
    codes = word[:, None] >> (torch.arange(8) * 4) & 15
    same(formats.decode_e4m3(out), formats.decode_e2m1(codes.to(torch.uint8)))


def test_e4m3_under_every_scale(lib):
    code, scale = every_pair(256)
    codes, out = unpacked(lib, "decode_e4m3x4", code, scale, 4, 0)
    exact = formats.decode_e4m3(codes) * formats.decode_ue8m0(scale)[:, None]
    # A NaN code stands only under a NaN scale; elsewhere it is not told from 480.
    nan_code = (codes & 0x7F) == 0x7F
    other = nan_code & (scale != 255)[:, None]
    rounded = exact.bfloat16().float() != exact
    assert (scale[:, None].expand_as(rounded)[rounded & ~exact.isnan()] < 3).all()
    same(out.masked_fill(other, 0), exact.masked_fill(other, 0))
    folds = (scale <= 134) | (scale == 255)
    _, folded = unpacked(lib, "decode_e4m3x4", code[folds].contiguous(), scale[folds].contiguous(), 4, 1)
    same(folded, out[folds])


@pytest.mark.parametrize(("ue8m0", "decode"), [(0, formats.decode_e4m3), (1, formats.decode_ue8m0)])
def test_scales(lib, ue8m0, decode):
    byte = torch.arange(256).to(torch.uint8)
    out = torch.empty(256)
    lib.decode_scales(address(byte), ue8m0, address(out), ctypes.c_int64(256))
    expected = decode(byte)
    assert torch.equal(out.nan_to_num(1e38), expected.nan_to_num(1e38))


def awkward() -> torch.Tensor:
    """All bfloat16 values, all midpoints of the formats with their neighbours, and random bits."""
    every = torch.arange(65536).to(torch.int32).bitwise_left_shift(16).view(torch.float32)
    e4m3 = formats.decode_e4m3(torch.arange(0x7F).to(torch.uint8))
    e2m1 = formats.decode_e2m1(torch.arange(8).to(torch.uint8))
    middle = torch.cat([(v[1:] + v[:-1]) / 2 for v in (e4m3, e2m1)])
    around = (middle.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)).flatten().view(torch.float32)
    bits = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32).view(torch.float32)
    return torch.cat([every, around, -around, bits, torch.randn(100_000) * 3])


@pytest.mark.parametrize(
    ("number", "encode"), [(0, formats.encode_e2m1), (1, formats.encode_e4m3), (2, formats.encode_ue8m0)]
)
def test_elements(lib, number, encode):
    x = awkward()
    out = torch.empty(len(x), dtype=torch.uint8)
    lib.encode_elements(number, address(x), address(out), ctypes.c_int64(len(x)))
    assert torch.equal(out, encode(x))


def test_bfloat16(lib):
    x = awkward()
    out = torch.empty(len(x), dtype=torch.bfloat16)
    lib.round_to_bf16(address(x), address(out), ctypes.c_int64(len(x)))
    same(out, x)


def encoded(lib, number: int, x: torch.Tensor) -> torch.Tensor:
    width = x.shape[1]
    size = (width // 2 + width // 16, width + width // 32, width // 2 + width // 32)[number]
    out = torch.empty(len(x), size, dtype=torch.uint8)
    lib.encode_rows(number, address(x), address(out), ctypes.c_int64(len(x)), ctypes.c_int64(width))
    return out


@pytest.mark.parametrize("number", [MAIN, WINDOW, INDEX])
def test_rows(lib, number):
    x = torch.randn(500, 512) * torch.logspace(-44, 38, 500)[:, None]
    x[0] = 0
    x[1, 5], x[2, 6], x[3, 7], x[4, 8] = float("nan"), float("inf"), -float("inf"), -float("nan")
    assert torch.equal(encoded(lib, number, x), QUANTIZE[number](x))


@pytest.mark.parametrize("number", [MAIN, WINDOW, INDEX])
def test_rows_at_ties_of_every_scale(lib, number):
    """A group per scale: its largest value names the scale, the others stand at the ties and a step beside them."""
    group = 16 if number == MAIN else 32
    decode, top = (
        (formats.decode_e4m3, 6.0) if number == MAIN else (formats.decode_ue8m0, 448.0 if number == 1 else 6.0)
    )
    scale = decode(torch.arange(1, 0x7F if number == MAIN else 248).to(torch.uint8))
    tie = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = (scale[:, None] * tie).view(torch.int32)[:, :, None] + torch.arange(-2, 3, dtype=torch.int32)
    values = values.view(torch.float32).flatten(1)
    values = torch.cat([values, -values], 1)
    share = group - 1
    for start in range(0, values.shape[1], share):
        part = values[:, start : start + share]
        part = torch.nn.functional.pad(part, (0, share - part.shape[1]))
        x = torch.cat([scale[:, None] * top, part], 1).contiguous()
        assert torch.equal(encoded(lib, number, x), QUANTIZE[number](x))
