"""Dense products against float64, at every instruction set, format and edge."""

from __future__ import annotations

import math

import pytest
import torch

import kernel_core
import mega_moe
from kernel_core.testing import (
    Guarded,
    assert_bitwise,
    assert_close,
    assert_repeatable,
    assert_row_invariant,
    assert_thread_invariant,
    at_page_end,
    each_isa,
)
from mega_moe import reference

KINDS = ["fp8", "bf16", "f32"]
SHAPES = [
    (0, 32, 32),
    (3, 4, 0),
    (1, 1, 1),
    (1, 128, 256),
    (3, 33, 31),
    (5, 70, 100),
    (6, 16, 64),
    (16, 31, 33),
    (17, 48, 96),
]


def relative_error(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Largest error in units of sum |x| |w|, against float64."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return ((actual.double() - exact).abs() / size.clamp_min(1e-300)).max().item() if actual.numel() else 0.0


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES)
def test_matches_float64(weights, isa, kind, tokens, rows, columns):
    x = weights.normal(tokens, columns)
    weight, scale = weights.dense(kind, rows, columns)
    out = Guarded((tokens, rows))
    with kernel_core.limit_isa(isa):
        mega_moe.linear(x, weight, scale, out=out.tensor)
    out.check()
    assert relative_error(out.tensor, x, reference.dequantize(weight, scale)) < 1e-6


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [32, 45, 64, 100])
def test_many_tokens(weights, isa, kind, tokens):
    x = weights.normal(tokens, 1056)  # more than one stretch of k
    weight, scale = weights.dense(kind, 80, 1056)
    with kernel_core.limit_isa(isa):
        assert relative_error(mega_moe.linear(x, weight, scale), x, reference.dequantize(weight, scale)) < 1e-6


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_the_batch(weights, isa, kind):
    x = weights.normal(70, 544)
    weight, scale = weights.dense(kind, 50, 544)
    with kernel_core.limit_isa(isa):
        picks = [0, 1, 4, 5, 9, 10, 15, 16, 20, 33, 69]
        assert_row_invariant(lambda rows: mega_moe.linear(rows, weight, scale), x, pick=picks)
        whole = mega_moe.linear(x, weight, scale)
        for count in (1, 2, 5, 6, 10, 11, 16, 17, 21, 22, 32, 33, 48, 49):
            assert_bitwise(mega_moe.linear(x[:count].contiguous(), weight, scale), whole[:count], name=f"{count} rows")


@each_isa()
def test_long_rows_do_not_depend_on_the_batch(weights, isa):
    """Rows of the released width are cut and ordered in another way than short ones."""
    x = weights.normal(150 if isa != "scalar" else 20, 1056)
    weight, scale = weights.fp8(300, 1056)
    with kernel_core.limit_isa(isa):
        assert_row_invariant(lambda rows: mega_moe.linear(rows, weight, scale), x, pick=[0, 4, 17, len(x) - 1])
        whole = mega_moe.linear(x, weight, scale)
        for count in (5, 10, 16, 17, 20):
            assert_bitwise(mega_moe.linear(x[:count].contiguous(), weight, scale), whole[:count], name=f"{count} rows")


@each_isa()
def test_repeats_and_threads(weights, isa):
    x = weights.normal(40, 512)
    weight, scale = weights.fp8(640, 512)
    with kernel_core.limit_isa(isa):
        assert_repeatable(lambda: mega_moe.linear(x, weight, scale))
        assert_thread_invariant(lambda: mega_moe.linear(x, weight, scale))


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
def test_long_sums_of_one_sign(weights, isa, kind):
    x = weights.normal(3, 8192).abs()
    weight, scale = weights.dense(kind, 32, 8192)
    weight = weight.view(torch.uint8).bitwise_and(0x7F).view(weight.dtype) if kind == "fp8" else weight.abs()
    with kernel_core.limit_isa(isa):
        y = mega_moe.linear(x, weight, scale)
    limit = 2e-6 if isa != "scalar" else 3e-5  # one lane adds 8192 numbers in a row
    assert relative_error(y, x, reference.dequantize(weight, scale)) < limit


@each_isa()
@pytest.mark.parametrize("byte", [0, 1, 9, 10, 127, 246, 247, 254, 255])
def test_every_fp8_code_at_extreme_scales(isa, byte):
    weight = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).view(torch.float8_e4m3fn).view(256, 32)
    scale = torch.full((8, 1), byte, dtype=torch.uint8)
    x = torch.zeros(2, 32)
    x[0, 5], x[1, 31] = 1.0, -1.0
    with kernel_core.limit_isa(isa):
        y = mega_moe.linear(x, weight, scale)
    expected = reference.linear(x, weight, scale)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y[~y.isnan()], expected[~y.isnan()])


@each_isa()
def test_every_bf16_code(isa):
    weight = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(-1, 1)
    weight = weight[weight.flatten().isfinite() & (weight.flatten().abs() >= 2.0**-126)].contiguous()
    with kernel_core.limit_isa(isa):
        y = mega_moe.linear(torch.tensor([[1.0], [-0.5]]), weight)
    assert torch.equal(y[0], weight[:, 0].float())
    assert torch.equal(y[1][y[1].abs() >= 2.0**-126], (weight[:, 0].float() * -0.5)[y[1].abs() >= 2.0**-126])


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_every_size(weights, isa, kind):
    x = weights.normal(12, 64) * torch.logspace(-30, 30, 12)[:, None]
    x[3, 7], x[4, 0] = torch.finfo(torch.float32).max, 1e-45
    weight, scale = weights.dense(kind, 16, 64)
    weight, scale = (weight, scale) if kind != "fp8" else (weight, torch.full_like(scale, 110))
    with kernel_core.limit_isa(isa):
        y = mega_moe.linear(x, weight, scale)
    exact = x.double() @ reference.dequantize(weight, scale).double().T
    size = x.double().abs() @ reference.dequantize(weight, scale).double().abs().T
    finite = size < torch.finfo(torch.float32).max
    flushed = 3 * 64 * 2.0**-126  # the tile unit drops products and parts below the normal numbers
    assert ((y.double() - exact).abs() - flushed <= 1e-6 * size)[finite].all()


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
def test_special_activations_stay_in_their_row(weights, isa, kind):
    x = weights.normal(7, 64)
    weight, scale = weights.dense(kind, 33, 64)
    with kernel_core.limit_isa(isa):
        clean = mega_moe.linear(x, weight, scale)
        x[2, 9], x[4, 40] = math.nan, math.inf
        y = mega_moe.linear(x, weight, scale)
    assert y[2].isnan().all() and not y[4].isfinite().any()
    column = reference.dequantize(weight, scale)[:, 40]
    assert torch.equal(y[4][column > 0], torch.full_like(y[4][column > 0], math.inf))
    for row in (0, 1, 3, 5, 6):
        assert_bitwise(y[row], clean[row])


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(33, 40), (16, 96), (48, 2)])
def test_reads_nothing_behind_its_arguments(weights, isa, kind, rows, columns):
    weight, scale = weights.dense(kind, rows, columns)
    x = weights.normal(5, columns)
    with kernel_core.limit_isa(isa):
        expected = mega_moe.linear(x, weight, scale)
        tight = at_page_end(scale) if scale is not None else None
        assert_bitwise(mega_moe.linear(at_page_end(x), at_page_end(weight), tight), expected)


@each_isa()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "groups", "rows", "columns"), [(1, 2, 64, 1024), (7, 3, 40, 96), (20, 4, 5, 33)])
def test_grouped(weights, isa, kind, tokens, groups, rows, columns):
    x = weights.normal(tokens, groups, columns)
    weight, scale = weights.dense(kind, groups * rows, columns)
    out = Guarded((tokens, groups, rows))
    with kernel_core.limit_isa(isa):
        mega_moe.grouped_linear(x, weight, scale, out=out.tensor)
        out.check()
        full = reference.dequantize(weight, scale)
        for g in range(groups):
            part = full[g * rows : (g + 1) * rows]
            assert relative_error(out.tensor[:, g], x[:, g], part) < 1e-6
        assert_row_invariant(lambda r: mega_moe.grouped_linear(r, weight, scale), x)


def test_grouped_equals_single_products(weights):
    x = weights.normal(6, 2, 128)
    weight, scale = weights.fp8(128, 128)
    y = mega_moe.grouped_linear(x, weight, scale)
    for g in range(2):
        rows = slice(g * 64, g * 64 + 64)
        single = mega_moe.linear(x[:, g].contiguous(), weight[rows], scale[g * 2 : g * 2 + 2])
        assert_bitwise(y[:, g].contiguous(), single)


def test_reference_backend_and_registered_op(weights):
    x = weights.normal(4, 64)
    weight, scale = weights.fp8(32, 64)
    with kernel_core.using("reference"):
        expected = mega_moe.linear(x, weight, scale)
    assert_close(mega_moe.linear(x, weight, scale), expected, atol=1e-5, rtol=1e-5)
    assert_bitwise(torch.ops.mega_moe.linear(x, weight, scale), mega_moe.linear(x, weight, scale))
    grouped = x.view(2, 2, 64)
    assert_bitwise(
        torch.ops.mega_moe.grouped_linear(grouped, weight, scale), mega_moe.grouped_linear(grouped, weight, scale)
    )


def test_bad_arguments(weights):
    x = weights.normal(4, 64)
    weight, scale = weights.fp8(32, 64)
    out = torch.full((4, 32), 7.0)
    cases = [
        ("x", dict(x=x.double())),
        ("x", dict(x=weights.normal(4, 32))),
        ("x", dict(x=weights.normal(64))),
        ("x", dict(x=weights.normal(64, 4).T)),
        ("weight", dict(weight=weight.float().half())),
        ("weight", dict(weight=weights.fp8(64, 32)[0].T)),
        ("scale", dict(scale=None)),
        ("scale", dict(scale=scale.float())),
        ("scale", dict(scale=scale.repeat(2, 1))),
        ("scale", dict(weight=weight.bfloat16())),
        ("out", dict(out=torch.empty(4, 33))),
        ("out", dict(out=torch.empty(4, 32, dtype=torch.float64))),
    ]
    for argument, change in cases:
        arguments = dict(x=x, weight=weight, scale=scale, out=out) | change
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed is"):
            mega_moe.linear(arguments.pop("x"), arguments.pop("weight"), arguments.pop("scale"), **arguments)
    with pytest.raises(ValueError, match=r"^weight: got 32 rows, allowed is a multiple of the 3 groups"):
        mega_moe.grouped_linear(weights.normal(1, 3, 64), weight, scale)
    with pytest.raises(ValueError, match=r"^out: got"):
        mega_moe.grouped_linear(weights.normal(1, 2, 64), weight, scale, out=out)
    assert (out == 7.0).all()


def test_other_devices_are_refused():
    x = torch.empty(1, 32, device="meta")
    with pytest.raises(NotImplementedError, match=r"mega_moe\.linear.*meta"):
        mega_moe.linear(x, torch.empty(32, 32, device="meta"))
