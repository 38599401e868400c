"""Hyper-connections in emulation against the reference."""

from __future__ import annotations

import pytest
import torch

import cann_ops
from cann_ops.reference import streams as reference


def problem(rows, d):
    return {
        "X": torch.randn(rows, 4, d),
        "y": torch.randn(rows, d),
        "post": torch.rand(rows, 4),
        "comb": torch.rand(rows, 4, 4),
        "fn": torch.randn(24, 4 * d) * 0.05,
        "base": torch.randn(24),
        "scale": torch.tensor([0.5, 0.7, 1.1]),
        "pre": torch.rand(rows, 4),
        "weight": torch.rand(d) + 0.5,
    }


@pytest.mark.parametrize("rows", [1, 70])
def test_update_and_mix(emulated, rows):
    p = problem(rows, 128)
    streams, expected = p["X"].clone(), p["X"].clone()
    cann_ops.hc_update(streams, p["y"], p["post"], p["comb"])
    reference.hc_update(expected, p["y"], p["post"], p["comb"])
    assert torch.allclose(streams, expected, rtol=1e-6, atol=1e-5)
    for weight in (None, p["weight"]):
        mixed = cann_ops.hc_mix(p["X"], p["pre"], weight)
        assert torch.allclose(mixed, reference.hc_mix(p["X"], p["pre"], weight), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 35])
def test_a_step_is_its_parts(emulated, rows):
    p = problem(rows, 512)
    streams, expected = p["X"].clone(), p["X"].clone()
    parameters = (p["fn"], p["base"], p["scale"])
    found = cann_ops.hc_step(streams, p["y"], p["post"], p["comb"], *parameters, p["pre"], p["weight"])
    reference.hc_update(expected, p["y"], p["post"], p["comb"])
    wanted = (
        reference.hc_mix(expected, p["pre"], p["weight"]), *reference.hc_coefficients(expected, *parameters)
    )  # fmt: skip
    assert torch.allclose(streams, expected, rtol=1e-6, atol=1e-5)
    for value, other in zip(found, wanted, strict=True):
        assert torch.allclose(value, other, rtol=1e-4, atol=2e-5)
    comb = found[3]
    assert torch.allclose(comb.sum(1), torch.ones(rows, 4), atol=1e-4), "columns add up to one"


def test_a_row_of_zeros_has_finite_coefficients(emulated):
    p = problem(3, 128)
    streams = p["X"]
    streams[1] = 0
    fn = torch.randn(24, 512)
    found = cann_ops.hc_coefficients(streams, fn, p["base"], p["scale"])
    for value, other in zip(found, reference.hc_coefficients(streams, fn, p["base"], p["scale"]), strict=True):
        assert value.isfinite().all() and torch.allclose(value, other, rtol=1e-4, atol=2e-5)


def test_no_rows_launch_nothing(emulated):
    p = problem(0, 128)
    assert cann_ops.hc_mix(p["X"], p["pre"], None).shape == (0, 128)
    assert cann_ops.hc_coefficients(p["X"], torch.zeros(24, 512), p["base"], p["scale"])[2].shape == (0, 4, 4)
