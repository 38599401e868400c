"""hc_step: one pass, the bits of the chain of separate ops, and of each token alone."""

from __future__ import annotations

import torch

import kernel_core
import mhc_engram
from kernel_core.testing import (
    Guarded,
    assert_bitwise,
    assert_close,
    assert_repeatable,
    assert_row_invariant,
    assert_thread_invariant,
    each_isa,
)
from mhc_engram import reference


def run(s, **options):
    """X after the step, then the results."""
    arguments = s.arguments()
    return (arguments[0], *mhc_engram.hc_step(*arguments, **options))


@each_isa()
def test_equals_the_chain(isa, make_step):
    with kernel_core.limit_isa(isa):
        for T, d in ((1, 256), (2, 128), (8, 256), (13, 528), (70, 144), (3, 5120)):
            s = make_step(T, d)
            X = s.X.clone()
            mhc_engram.hc_update(X, *s.update)
            chain = (X, mhc_engram.hc_mix(X, s.pre_mix, s.norm_weight), *mhc_engram.hc_coefficients(X, *s.parameters))
            for a, c in zip(run(s), chain, strict=True):
                assert_bitwise(a, c, name=f"T={T} d={d}")


def test_without_an_output_to_add(make_step):
    s = make_step(6, 256)
    X = s.X.clone()
    x, *coefficients = mhc_engram.hc_step(X, None, None, None, *s.parameters, s.pre_mix, s.norm_weight)
    assert_bitwise(X, s.X)
    assert_bitwise(x, mhc_engram.hc_mix(X, s.pre_mix, s.norm_weight))
    for a, c in zip(coefficients, mhc_engram.hc_coefficients(X, *s.parameters), strict=True):
        assert_bitwise(a, c)


def test_follows_the_reference_through_layers(make_step):
    """Forty half-layers with y = x: errors do not build up."""
    s = make_step(5, 128)
    states = []
    for step in (mhc_engram.hc_step, reference.hc_step):
        X, pre = s.X.clone(), s.pre_mix
        y = post = comb = None
        for _ in range(40):
            x, pre, post, comb = step(X, y, post, comb, *s.parameters, pre, s.norm_weight)
            y = x
        states.append(X)
    assert_close(states[0], states[1], atol=1e-3, rtol=1e-3, max_diff=1e-9)


@each_isa()
def test_row_invariance(isa, make_step):
    with kernel_core.limit_isa(isa):
        for T, d in ((37, 128), (5, 1040)):
            s = make_step(T, d)

            def step(X, y, post, comb, pre, s=s):
                X = X.clone()
                return X, *mhc_engram.hc_step(X, y, post, comb, *s.parameters, pre, s.norm_weight)

            assert_row_invariant(step, s.X, s.y, s.post, s.comb, s.pre_mix, name=f"T={T} d={d}")


def test_threads_and_repetition(make_step):
    for T, d in ((200, 256), (1, 5120)):
        s = make_step(T, d)
        assert_thread_invariant(lambda s=s: run(s), name=f"T={T} d={d}")
        assert_repeatable(lambda s=s: run(s), times=10)


def test_writes_its_results_only(make_step):
    for T, d in ((1, 16), (5, 144), (9, 256)):
        s = make_step(T, d)
        X, out = Guarded((T, 4, d)), Guarded((T, d))
        X.tensor.copy_(s.X)
        x, *_ = mhc_engram.hc_step(X.tensor, *s.arguments()[1:], out=out.tensor)
        assert x is out.tensor
        X.check("X")
        out.check("out")
        for a, e in zip((X.tensor, out.tensor), run(s)[:2], strict=True):
            assert_bitwise(a, e)


def test_coefficients_in_place(make_step):
    """pre_mix, post and comb may be overwritten by the new coefficients, with either backend."""
    for T, d in ((1, 128), (40, 256), (3, 1040)):
        s = make_step(T, d)
        expected = run(s)
        for backend in ("native", "reference"):
            X, y, post, comb, *parameters, pre, weight = (t.clone() for t in s.arguments())
            with kernel_core.using(backend):
                results = mhc_engram.hc_step(
                    X, y, post, comb, *parameters, pre, weight, coefficients=(pre, post, comb)
                )  # fmt: skip
            assert results[1] is pre and results[2] is post and results[3] is comb
            for a, e in zip((X, *results), expected, strict=True):
                assert_close(a, e, atol=2e-5, rtol=2e-5)
                if backend == "native":
                    assert_bitwise(a, e)


def test_reference_backend_and_dispatcher(make_step):
    s = make_step(4, 64)
    with kernel_core.using("reference"):
        by_reference = run(s, out=torch.empty(4, 64))
    arguments = s.arguments()
    by_dispatcher = (arguments[0], *torch.ops.mhc_engram.hc_step(*arguments))
    for a, b, c in zip(run(s), by_reference, by_dispatcher, strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert_bitwise(a, c)
