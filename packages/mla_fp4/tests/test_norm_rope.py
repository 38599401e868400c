"""RMSNorm and RoPE against the reference, at every instruction set."""

import pytest
import torch

import mla_fp4
from kernel_core import limit_isa, using
from kernel_core.testing import (
    Guarded,
    assert_bitwise,
    assert_close,
    assert_repeatable,
    assert_row_invariant,
    assert_thread_invariant,
    each_isa,
    edge_sizes,
)


def angles(rows, rope_dim):
    a = torch.randn(rows, rope_dim // 2)
    return torch.cat([a.cos(), a.sin()], dim=1)


@each_isa()
@pytest.mark.parametrize(
    ("shape", "rope_dim"),
    [
        ((1, 512), 64),
        ((7, 4, 512), 64),
        ((3, 64), 16),
        ((5, 2, 3, 64), 16),
        ((0, 4, 64), 16),
        ((2, 33), 2),
        ((4, 1), 0),
    ],
)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("inverse", [True, False])
def test_matches_reference(isa, shape, rope_dim, weighted, inverse):
    x = torch.randn(shape) * 3
    weight = torch.rand(shape[-1]) + 0.5 if weighted else None
    rope = angles(shape[0], rope_dim)
    with using("reference"):
        expected = mla_fp4.norm_rope(x, weight, 1e-6, rope, inverse=inverse)
    out = Guarded(shape)
    with limit_isa(isa):
        result = mla_fp4.norm_rope(x, weight, 1e-6, rope, inverse=inverse, out=out.tensor)
    out.check()
    assert result is out.tensor
    assert_close(result, expected, atol=1e-6, rtol=1e-6)


@each_isa()
@pytest.mark.parametrize("d", edge_sizes(130)[1:])
def test_every_width(isa, d):
    x, weight = torch.randn(3, d), torch.randn(d)
    with using("reference"):
        expected = mla_fp4.norm_rope(x, weight, 1e-6, None)
    with limit_isa(isa):
        assert_close(mla_fp4.norm_rope(x, weight, 1e-6, None), expected, atol=1e-6, rtol=2e-6)


@each_isa()
def test_zero_rows_and_extreme_values(isa):
    x = torch.zeros(3, 64)
    x[1] = 1e-30
    x[2] = 1e18
    with limit_isa(isa):
        y = mla_fp4.norm_rope(x, torch.ones(64), 1e-20, None)
    assert (y[0] == 0).all()
    assert_close(y[2], torch.ones(64), atol=1e-6, rtol=1e-6)
    with using("reference"):
        assert_close(y, mla_fp4.norm_rope(x, torch.ones(64), 1e-20, None), atol=1e-6, rtol=1e-6)


@each_isa()
def test_nan_stays_in_its_row(isa):
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    with limit_isa(isa):
        y = mla_fp4.norm_rope(x, torch.ones(64), 1e-6, angles(3, 16))
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


@each_isa()
def test_inverse_undoes_and_in_place(isa):
    x, rope = torch.randn(5, 4, 64), angles(5, 16)
    with limit_isa(isa):
        turned = mla_fp4.norm_rope(x, None, 1e-6, rope)
        assert_close(mla_fp4.norm_rope(turned, None, 1e-6, rope, inverse=True), x, atol=1e-6, rtol=1e-6)
        weight = torch.rand(64)
        expected = mla_fp4.norm_rope(x, weight, 1e-6, rope)
        y = x.clone()
        assert mla_fp4.norm_rope(y, weight, 1e-6, rope, out=y) is y
        assert_bitwise(y, expected)


@each_isa()
def test_rows_do_not_depend_on_each_other(isa):
    x, rope, weight = torch.randn(65, 8, 128), angles(65, 64), torch.rand(128)
    with limit_isa(isa):
        assert_row_invariant(lambda a, r: mla_fp4.norm_rope(a, weight, 1e-6, r), x, rope)
        assert_repeatable(lambda: mla_fp4.norm_rope(x, weight, 1e-6, rope), times=5)
        assert_thread_invariant(lambda: mla_fp4.norm_rope(x, weight, 1e-6, rope))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x"),
        ({"x": torch.zeros(64)}, "x"),
        ({"x": torch.zeros(64, 2).T}, "x"),
        ({"weight": torch.ones(63)}, "weight"),
        ({"eps": 0.0}, "eps"),
        ({"rope": torch.zeros(3, 16)}, "rope"),
        ({"rope": torch.zeros(2, 15)}, "rope"),
        ({"rope": torch.zeros(2, 66)}, "rope"),
        ({"out": torch.zeros(2, 63)}, "out"),
    ],
)
def test_bad_input_names_the_argument(change, argument):
    good = {"x": torch.zeros(2, 64), "weight": torch.ones(64), "eps": 1e-6, "rope": torch.zeros(2, 16)}
    with pytest.raises(ValueError, match=f"^{argument}: got .*, allowed is "):
        mla_fp4.norm_rope(**(good | change))
