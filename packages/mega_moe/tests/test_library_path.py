"""What a GPU runs as long as there are no kernels, on the CPU, against the reference."""

from __future__ import annotations

import pytest
import torch

import mega_moe
from kernel_core import using
from kernel_core.testing import assert_close
from mega_moe import library


def both(call):
    results = []
    for backend in ("reference", "library"):
        with using(backend):
            results.append(call())
    return results


@pytest.mark.parametrize("kind", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize("given", [False, True])
def test_products(weights, kind, given):
    matrix, scale = weights.dense(kind, 66, 64)
    for op, x, shape in (
        (mega_moe.linear, weights.normal(3, 64), (3, 66)),
        (mega_moe.grouped_linear, weights.normal(3, 2, 64), (3, 2, 33)),
    ):
        out = torch.full(shape, torch.nan) if given else None
        expected, actual = both(lambda: op(x, matrix, scale, out=out).clone())  # noqa: B023
        assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert actual.is_contiguous() and (out is None or out.equal(actual))


def test_products_of_split_rows(weights):
    matrix, scale = weights.dense("fp8", 64, 96)
    x = weights.normal(5, 96) * torch.logspace(-3, 3, 96)
    with using("reference"):
        expected = mega_moe.linear(x, matrix, scale)
    assert_close(library.linear_split(x, matrix, scale), expected, atol=1e-4, rtol=1e-5)
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    made = library.linear_split(x, matrix, scale)
    assert made[1].isnan().all() and not made[2].isfinite().any()
    assert_close(made[[0, 3, 4]], expected[[0, 3, 4]], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("at_once", [1 << 26, 1])
def test_experts(weights, tokens, shared, at_once, monkeypatch):
    """Few rows and many, empty slots, all experts at once or one after the other."""
    monkeypatch.setattr(library, "_EXPANDED", at_once)
    w13, s13 = weights.mxfp4(6, 128, 64)
    w2, s2 = weights.mxfp4(6, 64, 64)
    ids, gains = weights.routing(tokens, 6, 2)
    ids[::3, 1] = -1
    ids[1::5] = -1
    extra = weights.shared(64, 96) if shared else None
    x = weights.normal(tokens, 64)
    expected, actual = both(lambda: mega_moe.fused_experts(x, ids, gains, w13, s13, w2, s2, shared=extra))
    assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_an_empty_slot_is_deaf_to_nan(weights):
    w13, s13 = weights.mxfp4(2, 64, 64)
    w2, s2 = weights.mxfp4(2, 64, 32)
    s13[0] = 255
    ids = torch.tensor([[1, -1]] * 5, dtype=torch.int32)
    with using("library"):
        for rows in (1, 5):
            x, gains = weights.normal(rows, 64), torch.ones(rows, 2)
            assert mega_moe.fused_experts(x, ids[:rows], gains, w13, s13, w2, s2).isfinite().all()


def test_route(weights):
    logits, bias = weights.normal(7, 12), weights.normal(12)
    (ids, gains), found = both(lambda: mega_moe.route(logits, bias, 3))
    assert found[0].equal(ids) and found[1].equal(gains)
