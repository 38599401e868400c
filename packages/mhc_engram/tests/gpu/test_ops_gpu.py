"""The public ops with tensors on an NVIDIA GPU: PyTorch's operators, the CPU's results, no waiting for the device."""

from __future__ import annotations

import pytest
import torch

import mhc_engram
from kernel_core.testing import assert_bitwise, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def both(op, *arguments, **options):
    """Results on the CPU and on the GPU; for an op in place, its first argument."""
    there = [a.cuda() if torch.is_tensor(a) else a for a in arguments]
    expected = op(*arguments, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = op(*there, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if expected is None:
        expected, actual = arguments[0], there[0]
    if isinstance(expected, torch.Tensor):
        expected, actual = (expected,), (actual,)
    return [(a.cpu(), e) for a, e in zip(actual, expected, strict=True)]


def test_hyper_connections():
    X, fn = torch.randn(5, 4, 32), torch.randn(24, 128) * 0.1
    base, scale, weight = torch.randn(24), torch.rand(3), torch.rand(32)
    for actual, expected in both(mhc_engram.hc_coefficients, X, fn, base, scale):
        assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    pre, post, comb = mhc_engram.hc_coefficients(X, fn, base, scale)
    y = torch.randn(5, 32)
    for op, arguments in (
        (mhc_engram.hc_mix, (X, pre, weight)),
        (mhc_engram.hc_update, (X.clone(), y, post, comb)),
        (mhc_engram.hc_step, (X.clone(), y, post, comb, fn, base, scale, pre, weight)),
    ):
        for actual, expected in both(op, *arguments):
            assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_engram():
    mapped, dead = torch.randint(0, 99, (6,)), torch.tensor([False, True, False, False, False, False])
    history = torch.tensor([[5, -1, -1], [-1, -1, -1], [7, 8, 9]])
    cu = torch.tensor([0, 2, 2, 6]).int()
    multipliers, primes = torch.tensor([3, 5, 7, 2**60 + 1]), torch.tensor([11, 13, 17, 19, 23, 29])
    offsets = mhc_engram.engram_offsets(primes)
    ((rows, expected),) = both(mhc_engram.engram_rows, mapped, dead, history, cu, multipliers, primes, offsets, 4)
    assert_bitwise(rows, expected)
    table = torch.randn(int(primes.sum()), 32).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 130, (len(table), 1)).to(torch.uint8)
    ((values, expected),) = both(mhc_engram.engram_gather, table, scale, rows)
    assert_bitwise(values, expected)
    X, kv, weight = torch.randn(6, 4, 32), torch.randn(6, 160), torch.rand(4, 32)
    ((actual, expected),) = both(mhc_engram.engram_inject, X, kv, weight, dead)
    assert_close(actual, expected, atol=1e-5, rtol=1e-5)
