"""The public ops with tensors on an NVIDIA GPU: PyTorch's operators, the CPU's results, no waiting for the device."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import mega_moe
from kernel_core.testing import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def check(op, *arguments, **options):
    def moved(value):
        if isinstance(value, mega_moe.SharedExpert):
            return mega_moe.SharedExpert(*(getattr(value, f.name).cuda() for f in fields(value)))
        return value.cuda() if torch.is_tensor(value) else value

    expected = op(*arguments, **options)
    there, named = [moved(a) for a in arguments], {name: moved(a) for name, a in options.items()}
    op(*there, **named)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = op(*there, **named)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if isinstance(expected, tuple):
        ids, gains = expected
        assert actual[0].cpu().equal(ids)
        actual, expected = actual[1], gains
    assert_close(actual.cpu(), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kind", ["fp8", "bf16", "f32"])
def test_products(weights, kind):
    matrix, scale = weights.dense(kind, 130, 64)
    check(mega_moe.linear, weights.normal(5, 64), matrix, scale)
    check(mega_moe.grouped_linear, weights.normal(5, 2, 64), matrix, scale)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts(weights, tokens):
    w13, s13 = weights.mxfp4(6, 128, 64)
    w2, s2 = weights.mxfp4(6, 64, 64)
    ids, gains = weights.routing(tokens, 6, 2)
    ids[::3, 1] = -1
    shared = weights.shared(64, 96)
    check(mega_moe.fused_experts, weights.normal(tokens, 64), ids, gains, w13, s13, w2, s2, shared=shared)


def test_route(weights):
    check(mega_moe.route, weights.normal(7, 12), weights.normal(12), 3)
