"""Cache rows: bytes of the stored formats after norm and rotation."""

import pytest
import torch

import mla_fp4
from kernel_core import formats, limit_isa, using
from kernel_core.testing import (
    assert_bitwise,
    assert_close,
    assert_row_invariant,
    assert_thread_invariant,
    each_isa,
)

FORMATS = {
    "main": (formats.quantize_main, formats.dequantize_main),
    "window": (formats.quantize_window, formats.dequantize_window),
    "index": (formats.quantize_index, formats.dequantize_index),
}
SHAPES = [
    ("main", 512, 64),
    ("window", 512, 64),
    ("index", 128, 64),
    ("main", 64, 16),
    ("window", 64, 16),
    ("index", 32, 16),
]


def angles(rows, rope_dim):
    a = torch.randn(rows, rope_dim // 2)
    return torch.cat([a.cos(), a.sin()], dim=1)


@each_isa()
@pytest.mark.parametrize(("format", "d", "rope_dim"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_quantisation_alone_is_bit_exact(isa, format, d, rope_dim, rows):
    x = torch.randn(rows, d) * 10 ** torch.randn(rows, 1)
    with limit_isa(isa):
        assert_bitwise(mla_fp4.kv_rows(x, None, 1e-6, None, format=format), FORMATS[format][0](x))


@each_isa()
@pytest.mark.parametrize(("format", "d", "rope_dim"), SHAPES)
@pytest.mark.parametrize("round_bf16", [False, True])
def test_fused_equals_the_chain_of_ops(isa, format, d, rope_dim, round_bf16):
    x, weight, rope = torch.randn(9, d) * 4, torch.rand(d) + 0.5, angles(9, rope_dim)

    def rounded(y):
        return y.bfloat16().float() if round_bf16 else y

    with limit_isa(isa):
        chain = rounded(mla_fp4.norm_rope(rounded(mla_fp4.norm_rope(x, weight, 1e-6, None)), None, 1e-6, rope))
        rows = mla_fp4.kv_rows(x, weight, 1e-6, rope, format=format, round_bf16=round_bf16)
        plain = mla_fp4.kv_rows(x, weight, 1e-6, rope, format=format, quantize=False, round_bf16=round_bf16)
    assert_bitwise(plain, chain)
    assert_bitwise(rows, FORMATS[format][0](chain))


@each_isa()
@pytest.mark.parametrize(("format", "d", "rope_dim"), SHAPES)
@pytest.mark.parametrize("round_bf16", [False, True])
def test_close_to_reference(isa, format, d, rope_dim, round_bf16):
    """The mean square may differ in its last bit, so a value at a rounding boundary may move by one level."""
    x, weight, rope = torch.randn(33, d), torch.rand(d) + 0.5, angles(33, rope_dim)
    args = {"format": format, "round_bf16": round_bf16}
    with using("reference"):
        expected = mla_fp4.kv_rows(x, weight, 1e-6, rope, **args)
        plain = mla_fp4.kv_rows(x, weight, 1e-6, rope, quantize=False, **args)
    with limit_isa(isa):
        rows = mla_fp4.kv_rows(x, weight, 1e-6, rope, **args)
        assert_close(
            mla_fp4.kv_rows(x, weight, 1e-6, rope, quantize=False, **args),
            plain,
            # A bfloat16 step before the rotation reaches both values of a pair.
            atol=plain.abs().max().item() / 128 if round_bf16 else 1e-6,
            rtol=1e-6,
            max_diff=1e-6,
        )
    assert (rows != expected).float().mean() < 0.01
    expected_values = FORMATS[format][1](expected)
    # One level is at most a third of the largest value of a group: from 4 to 6 in units of its scale.
    level = expected_values.abs().max().item() / 3
    assert_close(FORMATS[format][1](rows), expected_values, atol=level * 1.01, rtol=0, max_diff=1e-3)


@each_isa()
def test_zero_rows_have_the_floor_scales(isa):
    zero = torch.zeros(2, 64)
    with limit_isa(isa):
        for format, codes, scale in (("main", 32, 0x01), ("window", 64, 105), ("index", 32, 1)):
            rows = mla_fp4.kv_rows(zero, torch.ones(64), 1e-20, None, format=format)
            assert (rows[:, :codes] == 0).all()
            assert (rows[:, codes:] == scale).all()


@each_isa()
def test_rotated_channels_are_quantised_too(isa):
    x, rope = torch.randn(3, 64), angles(3, 16)
    with limit_isa(isa):
        turned = mla_fp4.kv_rows(x, None, 1e-6, rope, format="window")
        still = mla_fp4.kv_rows(x, None, 1e-6, None, format="window")
    assert_bitwise(turned[:, :32], still[:, :32])
    assert (turned[:, 48:64] != still[:, 48:64]).any()


@each_isa()
def test_nan_stays_in_its_row(isa):
    x = torch.randn(3, 64)
    x[1, 3] = float("nan")
    with limit_isa(isa):
        for format in FORMATS:
            rows = mla_fp4.kv_rows(x, torch.ones(64), 1e-6, None, format=format)
            values = FORMATS[format][1](rows)
            assert values[1].isnan().all()
            assert not values[[0, 2]].isnan().any()


@each_isa()
def test_rows_do_not_depend_on_each_other(isa):
    x, weight, rope = torch.randn(40, 512), torch.rand(512), angles(40, 64)
    with limit_isa(isa):
        for format in FORMATS:
            assert_row_invariant(lambda a, r, f=format: mla_fp4.kv_rows(a, weight, 1e-6, r, format=f), x, rope)
        assert_thread_invariant(lambda: mla_fp4.kv_rows(x, weight, 1e-6, rope))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": torch.zeros(2, 64, dtype=torch.bfloat16)}, "x"),
        ({"x": torch.zeros(2, 1, 64)}, "x"),
        ({"x": torch.zeros(2, 72), "weight": None}, "x"),
        ({"format": "index", "x": torch.zeros(2, 48), "weight": None, "rope": None}, "x"),
        ({"format": "fp8"}, "format"),
        ({"weight": torch.ones(32)}, "weight"),
        ({"rope": torch.zeros(1, 16)}, "rope"),
        ({"eps": -1.0}, "eps"),
    ],
)
def test_bad_input_names_the_argument(change, argument):
    good = {"x": torch.zeros(2, 64), "weight": torch.ones(64), "eps": 1e-6, "rope": torch.zeros(2, 16)}
    with pytest.raises(ValueError, match=f"^{argument}: got .*, allowed "):
        mla_fp4.kv_rows(**(good | change))
