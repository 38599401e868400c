"""Router, MX products and experts in emulation against the reference."""

from __future__ import annotations

import pytest
import torch

import cann_ops
import kernel_core
from cann_ops.reference import experts as reference
from cann_ops.reference.rows import split_window
from kernel_core import formats
from kernel_core.testing import assert_bitwise


def hard_logits(rows, experts):
    logits = torch.randn(rows, experts) * 4
    corners = [0.0, -50.0, 200.0, torch.nan, -torch.inf, torch.inf, -173.0, 1e-30]
    for i, corner in enumerate(corners):
        logits[i] = corner
    logits[8, ::2] = torch.nan
    logits[9] = logits[9].round()
    return logits


@pytest.mark.parametrize("experts, top_k, image", [(384, 6, True), (384, 6, False), (40, 3, False), (8, 8, True)])
def test_routes_are_the_references(emulated, experts, top_k, image):
    logits, bias, other = hard_logits(37, experts), torch.randn(experts) * 0.1, torch.randn(experts) * 0.1
    options = {"bias_vl": other, "is_image": torch.rand(37) < 0.5} if image else {}
    ids, weights = cann_ops.route(logits, bias, top_k, **options)
    wanted, wanted_weights = reference.route(logits, bias, top_k, **options)
    assert_bitwise(ids, wanted)
    assert torch.equal(weights.isnan(), wanted_weights.isnan())
    assert torch.allclose(weights, wanted_weights, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("inter, rows", [(128, 1), (2304, 6)])
def test_swiglu_is_clamped_weighed_and_quantised(emulated, inter, rows):
    gate_up = torch.randn(rows, 2 * inter) * 8
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, -0.0])
    weights = torch.rand(rows)
    codes, scales = cann_ops.swiglu_quantize(gate_up, weights, limit=10.0)
    wanted, wanted_scales = reference.swiglu_quantize(gate_up, weights, limit=10.0)
    # Exponentials may differ in the last bit between libraries, and a code at a tie with them.
    assert (codes.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() < 1e-4
    assert_bitwise(scales, wanted_scales)


def mx_problem(counts, columns, depth, packed):
    first = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    codes, scales = split_window(formats.quantize_window(torch.randn(sum(counts) + 2, depth) * 3))
    weight = torch.randn(len(counts), columns, depth)
    pair = formats.quantize_mxfp4(weight) if packed else formats.quantize_fp8_rows(weight)
    return codes, scales, first, *pair


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_products_of_experts(emulated, packed):
    """Uneven experts, one of them without rows, and two rows that belong to none."""
    arguments = mx_problem([5, 0, 37], 256, 512, packed)
    found, expected = cann_ops.mx_linear(*arguments), reference.mx_linear(*arguments)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-4)
    assert (found[-2:] == 0).all()


@pytest.mark.slow
def test_fused_experts_is_the_chain_of_its_references(emulated):
    tokens, slots, experts, d, inter = 5, 2, 3, 1024, 256
    x = torch.randn(tokens, d)
    ids = torch.randint(0, experts, (tokens, slots), dtype=torch.int32)
    ids[1, 1], ids[2], ids[3, 0] = -1, -1, 77
    weights = torch.rand(tokens, slots)
    w13, s13 = formats.quantize_mxfp4(torch.randn(experts, 2 * inter, d) * 0.1)
    w2, s2 = formats.quantize_mxfp4(torch.randn(experts, d, inter) * 0.1)
    arguments = (x, ids, weights, w13, s13, w2, s2)
    found = cann_ops.fused_experts(*arguments)
    with kernel_core.using("reference"):
        expected = cann_ops.fused_experts(*arguments)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-2)
    assert (found[2] == 0).all()


def test_experts_in_float32_differ_by_the_rounding_of_activations_alone():
    """The chain against plain float32 arithmetic on the same weights: within what E4M3 with a scale for 32 loses."""
    tokens, experts, d, inter = 6, 2, 1024, 256
    x, weights = torch.randn(tokens, d), torch.rand(tokens, 1)
    ids = torch.randint(0, experts, (tokens, 1), dtype=torch.int32)
    w13, s13 = formats.quantize_mxfp4(torch.randn(experts, 2 * inter, d) * 0.1)
    w2, s2 = formats.quantize_mxfp4(torch.randn(experts, d, inter) * 0.1)
    with kernel_core.using("reference"):
        found = cann_ops.fused_experts(x, ids, weights, w13, s13, w2, s2)
    wide13, wide2 = formats.dequantize_mxfp4(w13, s13), formats.dequantize_mxfp4(w2, s2)
    exact = torch.stack(
        [
            reference.swiglu(x[t : t + 1] @ wide13[e].T, weights[t], 10.0)[0] @ wide2[e].T
            for t, e in enumerate(ids[:, 0].tolist())
        ]
    )
    assert float((found - exact).norm() / exact.norm()) < 0.06
