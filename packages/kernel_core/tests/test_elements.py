"""Element codes against definitions written independently: tables, and a search for the nearest value."""

import bisect
import itertools
import math

import pytest
import torch

import kernel_core
from kernel_core import formats, native_formats
from kernel_core.testing import assert_bitwise, each_isa

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:-1]


def nearest(magnitude: float, table: list[float]) -> int:
    """The code of the nearest table value: exact in float64, ties to the even code, saturating."""
    if magnitude >= table[-1]:
        return len(table) - 1
    high = bisect.bisect_left(table, magnitude)
    if table[high] == magnitude:
        return high
    low = high - 1
    below, above = magnitude - table[low], table[high] - magnitude
    if below == above:
        return low if low % 2 == 0 else high
    return low if below < above else high


def hard_values(table: list[float]) -> torch.Tensor:
    """Every value, every midpoint, and their float32 neighbours on both sides, with both signs."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    exact = torch.tensor(sorted({*table, *middles}), dtype=torch.float32)
    assert (exact.double() == torch.tensor(sorted({*table, *middles}), dtype=torch.float64)).all()
    up = torch.nextafter(exact, torch.tensor(math.inf))
    down = torch.nextafter(exact, torch.tensor(-math.inf))
    values = torch.cat((exact, up, down, torch.tensor([1e-45, 1e-38, table[-1] * 1.04, 3.4e38, math.inf])))
    return torch.cat((values, -values))


def expected_codes(x: torch.Tensor, table: list[float], sign_bit: int) -> torch.Tensor:
    codes = [nearest(abs(v), table) | (sign_bit if math.copysign(1, v) < 0 else 0) for v in x.double().tolist()]
    return torch.tensor(codes, dtype=torch.uint8)


def test_all_sixteen_e2m1_codes():
    values = formats.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert_bitwise(values, torch.tensor([*E2M1, *(-v for v in map(float, E2M1))]))
    assert_bitwise(formats.encode_e2m1(values), torch.arange(16, dtype=torch.uint8))


def test_all_256_e4m3_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    values = formats.decode_e4m3(codes)
    assert_bitwise(values[:127], torch.tensor(E4M3))
    assert_bitwise(values[128:255], -torch.tensor(E4M3))
    assert values[127].isnan() and values[255].isnan()
    back = formats.encode_e4m3(values)
    assert_bitwise(back[:255], codes[:255])
    assert back[255] == 0x7F  # one NaN


def test_all_256_ue8m0_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    values = formats.decode_ue8m0(codes)
    assert values[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[255].isnan()
    assert_bitwise(formats.encode_ue8m0(values)[1:], codes[1:])
    assert formats.encode_ue8m0(values[:1]) == 1  # a subnormal is rounded up to the smallest normal power


@pytest.mark.parametrize(("name", "table", "sign"), [("e2m1", E2M1, 8), ("e4m3", E4M3, 128)])
def test_rounding_at_every_value_and_midpoint(name, table, sign):
    x = hard_values(table)
    assert_bitwise(getattr(formats, f"encode_{name}")(x), expected_codes(x, table, sign))


def test_ue8m0_is_the_ceiling_of_the_logarithm():
    for k in range(-126, 128):
        power = torch.tensor(2.0**k)
        above = torch.nextafter(power, torch.tensor(math.inf))
        below = torch.nextafter(power, torch.tensor(0.0))
        assert formats.encode_ue8m0(power) == k + 127
        assert formats.encode_ue8m0(above) == k + 128
        assert formats.encode_ue8m0(below) == max(k + 127, 1)


def test_special_inputs():
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0])
    assert formats.encode_e2m1(x).tolist() == [0, 0, 7, 15, 8, 0]
    assert formats.encode_e4m3(x).tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x80, 0]
    assert formats.encode_ue8m0(x).tolist() == [255, 255, 255, 255, 0, 0]


def test_nibbles_put_the_even_element_low():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    packed = formats.pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert_bitwise(formats.unpack_nibbles(packed), codes)
    assert_bitwise(formats.unpack_nibbles(packed.view(torch.int8)), codes)
    with pytest.raises(ValueError, match="codes: got last size 3"):
        formats.pack_nibbles(codes[:, :3])


@pytest.mark.parametrize("decode", ["decode_e2m1", "decode_e4m3", "decode_ue8m0", "unpack_nibbles"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_codes_of_a_wider_dtype_are_refused(decode, dtype):
    with pytest.raises(ValueError, match=r"got dtype torch\.\w+, allowed is torch\.uint8"):
        getattr(formats, decode)(torch.zeros(4, dtype=dtype))


@each_isa()
@pytest.mark.parametrize("name", ["e2m1", "e4m3", "ue8m0"])
def test_native_elements_equal_the_reference(name, isa):
    all_over = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    with kernel_core.limit_isa(isa):
        for x in (hard_values(E2M1), hard_values(E4M3), all_over, torch.empty(0)):
            actual = getattr(native_formats, f"encode_{name}")(x)
            assert_bitwise(actual, getattr(formats, f"encode_{name}")(x), name=f"{name} at {isa}")
