"""hc_coefficients, hc_mix, hc_update against the formulas."""

from __future__ import annotations

import pytest
import torch

import kernel_core
import mhc_engram
from kernel_core.testing import assert_bitwise, assert_close, each_isa, edge_sizes
from mhc_engram import reference

WIDTHS = (16, 128, 144, 256, 528, 5120)
TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33)


def sizes(isa: str):
    most = 9000 if isa == "scalar" else 21_000
    return [(T, d) for d in WIDTHS for T in TOKENS if T * d <= most]


@each_isa()
def test_coefficients(isa, make_step):
    with kernel_core.limit_isa(isa):
        for T, d in sizes(isa):
            s = make_step(T, d)
            actual = mhc_engram.hc_coefficients(s.X, *s.parameters)
            exact = reference.hc_coefficients(s.X.double(), *(p.double() for p in s.parameters))
            for name, a, e in zip(("pre", "post", "comb"), actual, exact, strict=True):
                assert_close(a, e.float(), atol=2e-6, rtol=1e-5, name=f"{name} T={T} d={d}")


def test_combination_is_doubly_stochastic(make_step):
    comb = mhc_engram.hc_coefficients(make_step(50, 256).X, *make_step(50, 256).parameters, iters=50)[2]
    assert_close(comb.sum(1), torch.ones(50, 4), atol=1e-5, rtol=0, name="columns")
    assert_close(comb.sum(2), torch.ones(50, 4), atol=5e-2, rtol=0, name="rows")


def test_orientation_of_comb(make_step):
    """The first index is the source: a comb that copies stream 2 to stream 0 does that and not the reverse."""
    s = make_step(1, 16)
    comb = torch.zeros(1, 4, 4)
    comb[0, 2, 0] = 1
    X = s.X.clone()
    mhc_engram.hc_update(X, s.y, torch.zeros(1, 4), comb)
    assert_bitwise(X[0, 0], s.X[0, 2])
    assert torch.all(X[0, 1:] == 0)


@pytest.mark.parametrize("iters", [1, 2, 5])
def test_iterations(iters, make_step):
    s = make_step(5, 32)
    actual = mhc_engram.hc_coefficients(s.X, *s.parameters, iters=iters)
    expected = reference.hc_coefficients(s.X, *s.parameters, iters=iters)
    assert_close(actual[2], expected[2], atol=1e-6, rtol=1e-5)


def test_zero_streams_and_extreme_logits(make_step):
    s = make_step(3, 64)
    s.X[1] = 0
    s.base[:] = torch.linspace(-200, 200, 24)
    for a, e in zip(
        mhc_engram.hc_coefficients(s.X, *s.parameters), reference.hc_coefficients(s.X, *s.parameters), strict=True
    ):
        assert torch.isfinite(a).all()
        assert_close(a, e, atol=2e-6, rtol=1e-4)


def test_nan_stays_in_its_token(make_step):
    s = make_step(20, 128)
    clean = mhc_engram.hc_step(*s.arguments())
    s.X[7, 2, 5] = torch.nan
    spoilt = mhc_engram.hc_step(*s.arguments())
    rest = torch.arange(20) != 7
    for a, b in zip(spoilt, clean, strict=True):
        assert a[7].isnan().all()
        assert_bitwise(a[rest], b[rest])


@each_isa()
def test_update_and_mix(isa, make_step):
    with kernel_core.limit_isa(isa):
        for T, d in sizes(isa):
            s = make_step(T, d)
            X, expected = s.X.clone(), s.X.clone()
            mhc_engram.hc_update(X, *s.update)
            reference.hc_update(expected, *s.update)
            assert_close(X, expected, atol=1e-5, rtol=1e-5, name=f"update T={T} d={d}")
            for weight in (s.norm_weight, None):
                mixed = mhc_engram.hc_mix(X, s.pre_mix, weight)
                assert_close(mixed, reference.hc_mix(X, s.pre_mix, weight), atol=1e-5, rtol=2e-5, name="mix")


def test_many_token_counts(make_step):
    """Every count of leftover tokens beside full blocks."""
    for T in edge_sizes(130):
        s = make_step(T, 48)
        expected = reference.hc_step(*s.arguments())
        for a, e in zip(mhc_engram.hc_step(*s.arguments()), expected, strict=True):
            assert_close(a, e, atol=1e-5, rtol=2e-5, name=f"T={T}")


def test_norm_eps_counts(make_step):
    s = make_step(2, 32)
    X = s.X * 1e-3
    mixed = mhc_engram.hc_mix(X, s.pre_mix, s.norm_weight, 1e-2)
    assert_close(mixed, reference.hc_mix(X, s.pre_mix, s.norm_weight, 1e-2), atol=1e-7, rtol=1e-5)
    actual = mhc_engram.hc_coefficients(X, *s.parameters, norm_eps=1e-2, hc_eps=1e-2)
    expected = reference.hc_coefficients(X, *s.parameters, norm_eps=1e-2, hc_eps=1e-2)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, atol=1e-6, rtol=1e-5)
