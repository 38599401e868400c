"""The C++ codecs: the bytes of the reference at every instruction set, inside their buffers, for every row alike."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_core
from kernel_core import formats, native_formats
from kernel_core.testing import (
    Guarded,
    assert_bitwise,
    assert_row_invariant,
    assert_thread_invariant,
    at_page_end,
    each_isa,
    edge_sizes,
    poisoned,
)

KINDS = ("main", "window", "index")
PAIRS = ("mxfp4", "fp8_rows", "fp8_block")


def wild(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows of every magnitude, some with zeros, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 2.0 ** torch.randint(-140, 120, (rows, 1), generator=generator)
    if rows > 6:
        x[0], x[1] = 0, -0.0
        x[2, width // 2], x[3, 1], x[4, 0], x[5, -1] = math.nan, math.inf, -math.inf, 1e-45
        x[6] = torch.randn(width, generator=generator)
    return x


def same_values(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Bitwise, with every NaN equal to every other."""
    assert torch.equal(actual.isnan(), expected.isnan()), name
    assert_bitwise(actual.nan_to_num(7.5e7), expected.nan_to_num(7.5e7), name=name)


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 64, 96, 128, 512, 1056])
def test_rows_equal_the_reference(kind, width, isa):
    with kernel_core.limit_isa(isa):
        for count in (0, 1, 7, 65):
            x = wild(count, width)
            expected = getattr(formats, f"quantize_{kind}")(x)
            rows = getattr(native_formats, f"quantize_{kind}")(x)
            assert_bitwise(rows, expected, name=f"{kind} at {isa}")
            values = getattr(native_formats, f"dequantize_{kind}")(rows)
            same_values(values, getattr(formats, f"dequantize_{kind}")(rows), f"{kind} at {isa}")


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_decodes_as_in_the_reference(kind, isa):
    size = getattr(formats, f"{kind}_row_bytes")(32)
    rows = torch.randint(0, 256, (2000, size), dtype=torch.uint8)
    rows[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    with kernel_core.limit_isa(isa):
        values = getattr(native_formats, f"dequantize_{kind}")(rows)
    same_values(values, getattr(formats, f"dequantize_{kind}")(rows), f"{kind} at {isa}")


@each_isa()
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (33, 64), (7, 512)])
def test_weights_equal_the_reference(pair, shape, isa):
    weight = wild(*shape)
    expected = getattr(formats, f"quantize_{pair}")(weight)
    with kernel_core.limit_isa(isa):
        actual = getattr(native_formats, f"quantize_{pair}")(weight)
        values = getattr(native_formats, f"dequantize_{pair}")(*expected)
    for part, reference in zip(actual, expected, strict=True):
        assert_bitwise(part.view(torch.uint8), reference.view(torch.uint8), name=f"{pair} at {isa}")
    same_values(values, getattr(formats, f"dequantize_{pair}")(*expected), f"{pair} at {isa}")


@each_isa()
def test_fp8_blocks_of_any_size(isa):
    with kernel_core.limit_isa(isa):
        for o in (1, 31, 33):
            for i in edge_sizes(100)[1:]:
                weight = torch.randn(o, i)
                actual, expected = native_formats.quantize_fp8_block(weight), formats.quantize_fp8_block(weight)
                for part, reference in zip(actual, expected, strict=True):
                    assert_bitwise(part.view(torch.uint8), reference.view(torch.uint8))
                values = native_formats.dequantize_fp8_block(*expected)
                assert_bitwise(values, formats.dequantize_fp8_block(*expected))


@each_isa()
@given(st.binary(min_size=128, max_size=128))
@settings(max_examples=100, deadline=None)
def test_any_float_bits_encode_as_in_the_reference(isa, data):
    x = torch.frombuffer(bytearray(data), dtype=torch.float32).clone()
    with kernel_core.limit_isa(isa):
        for kind in KINDS:
            actual = getattr(native_formats, f"quantize_{kind}")(x)
            assert_bitwise(actual, getattr(formats, f"quantize_{kind}")(x), name=f"{kind} at {isa}")


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
def test_stays_inside_its_buffers(kind, isa):
    x = at_page_end(torch.randn(5, 96))
    size = getattr(formats, f"{kind}_row_bytes")(96)
    rows, values = Guarded((5, size), torch.uint8), Guarded((5, 96))
    with kernel_core.limit_isa(isa):
        getattr(native_formats, f"quantize_{kind}")(x, out=rows.tensor)
        getattr(native_formats, f"dequantize_{kind}")(at_page_end(rows.tensor), out=values.tensor)
    rows.check("rows")
    values.check("values")
    assert values.tensor.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_nothing_else(kind):
    quantize = getattr(native_formats, f"quantize_{kind}")
    dequantize = getattr(native_formats, f"dequantize_{kind}")
    x = torch.randn(300, 512)
    assert_row_invariant(quantize, x)
    assert_row_invariant(dequantize, quantize(x))
    assert_thread_invariant(lambda: (quantize(x), dequantize(quantize(x))))


def test_errors_come_before_anything_is_written():
    x = torch.randn(4, 64)
    out = poisoned((4, 36), torch.uint8)
    for bad, message in (
        (x.double(), "x: got dtype torch.float64"),
        (x[:, ::2], "x: got strides"),
        (x[:, :40].contiguous(), r"x: got shape \[4, 40\]"),
        (x.to("meta"), "x: got device meta"),
        (torch.randn(3, 64), r"out: got shape \[4, 36\], allowed is \[3, 36\]"),
    ):
        with pytest.raises(ValueError, match=message):
            native_formats.quantize_main(bad, out=out)
    with pytest.raises(ValueError, match=r"out: got dtype torch\.float32"):
        native_formats.quantize_main(x, out=torch.empty(4, 36))
    assert (out == 0xFF).all()
