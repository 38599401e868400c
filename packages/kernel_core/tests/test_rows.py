"""Cache rows: bytes at fixed places, the edges of the scale rules, and what survives a round trip."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_core import formats
from kernel_core.testing import assert_bitwise

KINDS = ("main", "window", "index")
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize(kind, x):
    return getattr(formats, f"quantize_{kind}")(x)


def dequantize(kind, rows):
    return getattr(formats, f"dequantize_{kind}")(rows)


@pytest.mark.parametrize(
    ("kind", "width", "size"), [("main", 512, 288), ("main", 64, 36), ("window", 512, 528), ("index", 128, 68)]
)
def test_sizes(kind, width, size):
    assert getattr(formats, f"{kind}_row_bytes")(width) == size
    assert getattr(formats, f"{kind}_row_width")(size) == width
    assert quantize(kind, torch.zeros(3, 2, width)).shape == (3, 2, size)
    assert dequantize(kind, torch.zeros(3, 2, size, dtype=torch.uint8)).shape == (3, 2, width)


@pytest.mark.parametrize(("kind", "scale"), [("main", 0x01), ("window", 105), ("index", 1)])
def test_zero_groups(kind, scale):
    width = 64
    rows = quantize(kind, torch.zeros(2, width))
    values = width if kind == "window" else width // 2
    assert (rows[:, :values] == 0).all()
    assert (rows[:, values:] == scale).all()
    assert (dequantize(kind, rows) == 0).all()


def test_main_row_byte_by_byte():
    x = torch.zeros(32)
    x[0], x[1], x[2], x[15] = 6.0, -3.0, 0.5, 1.0  # first group: amax 6, scale 1
    x[16], x[31] = -12.0, 4.0  # second group: scale 2
    row = quantize("main", x)
    assert row.tolist() == [0xD7, 0x01, 0, 0, 0, 0, 0, 0x20, 0x0F, 0, 0, 0, 0, 0, 0, 0x40, 0x38, 0x40]
    assert_bitwise(dequantize("main", row), x)


def test_window_row_byte_by_byte():
    x = torch.zeros(32)
    x[0], x[1], x[31] = 448.0, -1.0, 2.0**-9
    row = quantize("window", x)
    assert row.tolist() == [0x7E, 0xB8, *[0] * 29, 0x01, 127]
    assert_bitwise(dequantize("window", row), x)


def test_index_row_byte_by_byte():
    x = torch.zeros(64)
    x[0], x[1], x[63] = 6.0, -0.5, 96.0
    row = quantize("index", x)
    assert row.tolist() == [0x97, *[0] * 30, 0x70, 127, 131]
    assert_bitwise(dequantize("index", row), x)


def test_reciprocal_and_division_differ_at_42_ties_a_sign():
    """The stored code follows the product with the rounded reciprocal; the rules part only at these exact ties."""
    codes = torch.arange(1, 127, dtype=torch.uint8)
    scales = formats.decode_e4m3(codes)
    differing = 0
    for tie in TIES:
        x = scales * tie
        product, quotient = formats.encode_e2m1(x * (1 / scales)), formats.encode_e2m1(x / scales)
        apart = product != quotient
        if tie in (1.25, 2.5, 5.0):
            differing += int(apart.sum())
            assert torch.equal(apart, (codes > 7) & (codes % 8 == 7))  # scale mantissa 1.875
            assert (formats.decode_e2m1(product[apart]) == {1.25: 1.5, 2.5: 3.0, 5.0: 6.0}[tie]).all()
            assert (formats.decode_e2m1(quotient[apart]) == {1.25: 1.0, 2.5: 2.0, 5.0: 4.0}[tie]).all()
        else:
            assert not apart.any()
    assert differing == 42


def test_reciprocal_and_division_next_to_a_tie():
    """One float32 step below a tie the product may round onto it; no bfloat16 lies there."""
    scales = formats.decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    for tie in TIES:
        for to in (0.0, math.inf):
            x = torch.nextafter(scales * tie, torch.tensor(to))
            apart = formats.encode_e2m1(x * (1 / scales)) != formats.encode_e2m1(x / scales)
            assert not (apart & (x.bfloat16().float() == x)).any()
            assert not apart.any() or (to == 0.0 and tie in (0.75, 1.75, 3.5))


def test_ties_in_rows_follow_the_reciprocal():
    scales = formats.decode_e4m3(torch.arange(8, 127, dtype=torch.uint8))
    group = torch.tensor([6.0, *TIES, *(-t for t in TIES), 0.0])
    rows = quantize("main", scales[:, None] * group)
    assert_bitwise(rows[:, 8:].flatten(), torch.arange(8, 127, dtype=torch.uint8))
    magnitudes = formats.decode_e2m1(formats.unpack_nibbles(rows[:, :8].contiguous()))
    plain = torch.tensor([6.0, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0])
    bumped = torch.tensor([6.0, 0, 1, 1.5, 2, 3, 4, 6, 0, -1, -1.5, -2, -3, -4, -6, 0])
    odd = (torch.arange(8, 127) % 8 == 7)[:, None]
    assert torch.equal(magnitudes, torch.where(odd, bumped, plain))


@pytest.mark.parametrize(("kind", "peak", "floor"), [("index", 6, 6 * Fraction(2) ** -126), ("window", 448, None)])
def test_power_of_two_scales_at_their_edges(kind, peak, floor):
    """Just at, below and above peak * 2^k: the exact ceiling, found with fractions."""
    lowest = Fraction(float(torch.tensor(1e-4))) if floor is None else floor
    width = 32 if kind == "window" else 16
    for k in range(-149, 125 if kind == "index" else 119):
        middle = torch.tensor(peak * 2.0**k, dtype=torch.float32)
        for value in (middle, *(torch.nextafter(middle, torch.tensor(to)) for to in (0.0, math.inf))):
            ratio = max(Fraction(value.item()), lowest) / peak
            exponent = math.floor(math.log2(ratio))
            while Fraction(2) ** exponent < ratio:
                exponent += 1
            assert quantize(kind, value.expand(32).contiguous())[width].item() == exponent + 127


def test_main_scale_rounds_and_saturates():
    for amax, scale in (
        (6 * 1.0625, 1.0),
        (6 * 1.1875, 1.25),
        (6 * 448.0, 448.0),
        (1e9, 448.0),
        (6 * 2.0**-10, 2.0**-9),
    ):
        row = quantize("main", torch.full((16,), amax))
        assert formats.decode_e4m3(row[8:]).item() == scale


@pytest.mark.parametrize("kind", KINDS)
def test_nan_marks_its_group_and_no_other(kind):
    x = torch.randn(64)
    clean = dequantize(kind, quantize(kind, x))
    group = 16 if kind == "main" else 32
    for bad in (math.nan, -math.nan):
        x2 = x.clone()
        x2[group + 3] = bad
        values = dequantize(kind, quantize(kind, x2))
        assert values[group : 2 * group].isnan().all()
        values[group : 2 * group] = clean[group : 2 * group]
        assert_bitwise(values, clean)


def test_infinity_saturates_main_and_marks_the_others():
    x = torch.ones(32)
    x[0], x[16] = math.inf, -math.inf
    values = dequantize("main", quantize("main", x))
    assert values[0] == 2688 and values[16] == -2688 and (values[1:16] == 0).all()
    for kind in ("window", "index"):
        assert dequantize(kind, quantize(kind, x)).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_exact_in_bfloat16_and_stable(kind):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 512, generator=generator) * 2 ** torch.randn(64, 1, generator=generator)
    values = dequantize(kind, quantize(kind, x))
    assert_bitwise(values.bfloat16().float(), values)
    again = dequantize(kind, quantize(kind, values))
    assert torch.equal(again, values)


def test_worst_relative_error_of_a_group():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(256, 512, generator=generator)
    # half a step at the top of E2M1 (1 of 6), plus the scale's own rounding (1/16); E4M3: half of 1/8 of a binade
    for kind, group, bound in (("main", 16, 1 / 6 + 1 / 16), ("index", 32, 1 / 3), ("window", 32, 1 / 14)):
        error = (dequantize(kind, quantize(kind, x)) - x).abs().unflatten(-1, (-1, group)).amax(-1)
        amax = x.abs().unflatten(-1, (-1, group)).amax(-1)
        assert (error <= bound * amax).all()


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=32, max_size=32))
@settings(max_examples=100, deadline=None)
def test_no_value_within_reach_would_be_nearer(values):
    """For UE8M0 rows the stored value is the nearest multiple that the group's scale offers."""
    x = torch.tensor(values, dtype=torch.float32)
    row = quantize("index", x)
    scale = formats.decode_ue8m0(row[16:]).double()
    choices = formats.decode_e2m1(torch.arange(8, dtype=torch.uint8)).double() * scale
    best = (x.double().abs()[:, None] - choices).abs().amin(1)
    assert torch.equal((dequantize("index", row).double() - x.double()).abs(), best)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_widths_and_dtypes(kind):
    with pytest.raises(ValueError, match=r"x: got shape \[2, 40\], allowed is a last size"):
        quantize(kind, torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"x: got dtype torch\.int64"):
        quantize(kind, torch.zeros(2, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match="rows: got 35 bytes a row"):
        dequantize(kind, torch.zeros(2, 35, dtype=torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_inputs_are_widened(kind):
    x = torch.randn(4, 64).bfloat16()
    assert_bitwise(quantize(kind, x), quantize(kind, x.float()))


def test_index_page_is_segregated():
    rows = quantize("index", torch.randn(5, 8, 128))
    page = formats.index_page_from_rows(rows)
    assert page.shape == (5, 8 * 68)
    assert_bitwise(page[:, : 8 * 64].unflatten(1, (8, 64)), rows[..., :64])
    assert_bitwise(page[:, 8 * 64 :].unflatten(1, (8, 4)), rows[..., 64:])
    assert_bitwise(formats.index_page_rows(page, 8), rows)
    assert_bitwise(formats.join_index_page(*formats.split_index_page(page, 8)), page)
    with pytest.raises(ValueError, match="page: got 544 bytes, allowed is a multiple of rows_per_block = 7"):
        formats.split_index_page(page, 7)
