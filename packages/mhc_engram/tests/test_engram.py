"""Table look-up and the gated addition."""

from __future__ import annotations

import pytest
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
    at_page_end,
    each_isa,
)
from mhc_engram import reference


def table_of(rows: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All finite E4M3 codes and exponents from far apart."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, dim), generator=g, dtype=torch.int64).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = torch.randint(60, 190, (rows, dim // 32), generator=g, dtype=torch.int64).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn), scale


def problem(T: int, n: int, d: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed + T * 31 + d)
    X = torch.randn(T, n, d, generator=g) * 2
    kv = torch.randn(T, (n + 1) * d, generator=g)
    return X, kv, torch.randn(n, d, generator=g), torch.rand(T, generator=g) < 0.3


@each_isa()
def test_gather(isa):
    with kernel_core.limit_isa(isa):
        for dim, C, T in ((32, 24, 7), (256, 24, 5), (96, 1, 1), (32, 5, 0)):
            table, scale = table_of(41, dim)
            rows = torch.randint(-1, 41, (T, C), generator=torch.Generator().manual_seed(T))
            actual = mhc_engram.engram_gather(table, scale, rows)
            assert_bitwise(actual + 0.0, reference.engram_gather(table, scale, rows) + 0.0)
            assert_bitwise(actual, actual.bfloat16().float())


def test_gather_reads_only_the_named_rows():
    """Row 0 holds NaN everywhere; -1 neither reads it nor the memory before the table."""
    table, scale = table_of(8, 64)
    table.view(torch.uint8)[0] = 0x7F
    scale[0] = 255
    rows = torch.tensor([[-1, 7], [7, -1]])
    out = Guarded((2, 128))
    mhc_engram.engram_gather(at_page_end(table), at_page_end(scale), rows, out=out.tensor)
    out.check()
    assert torch.isfinite(out.tensor).all()
    assert torch.all(out.tensor[0, :64] == 0)
    assert mhc_engram.engram_gather(table, scale, torch.tensor([[0]])).isnan().all()


def test_gather_checks_rows_before_writing():
    table, scale = table_of(8, 64)
    for bad in (8, -2, 2**40):
        out = torch.full((2, 128), 5.0)
        with pytest.raises(ValueError, match=r"rows: got .* at \(1, 0\)"):
            mhc_engram.engram_gather(table, scale, torch.tensor([[0, 1], [bad, 0]]), out=out)
        assert torch.all(out == 5)


@each_isa()
def test_inject(isa):
    with kernel_core.limit_isa(isa):
        for T, n, d in ((0, 4, 128), (1, 4, 128), (3, 4, 256), (9, 2, 144), (2, 4, 5120), (1, 1, 16)):
            X, kv, qk, dead = problem(T, n, d)
            for mask in (dead, None):
                actual, expected = X.clone(), X.clone()
                mhc_engram.engram_inject(actual, kv, qk, mask)
                reference.engram_inject(expected, kv, qk, mask)
                assert_close(actual, expected, atol=1e-5, rtol=1e-5, name=f"T={T} n={n} d={d}")
                if mask is not None:
                    assert_bitwise(actual[mask], X[mask])


def test_gate_values():
    """Known gates: a key along X, against it, across it, and nothing at all."""
    X = torch.ones(4, 1, 16)
    key = torch.stack([torch.ones(16), -torch.ones(16), torch.tensor([1.0, -1.0] * 8), torch.zeros(16)])
    kv = torch.cat([key, torch.ones(4, 16)], 1)
    mhc_engram.engram_inject(X, kv, torch.ones(1, 16), None)
    gates = torch.sigmoid(torch.tensor([2.0, -2.0, 0.0, 0.0]))  # |dot| = sqrt(16)
    assert_close(X[:, 0, 0], 1 + gates, atol=1e-6, rtol=1e-6)


def test_small_dots_keep_a_floor():
    X = torch.ones(1, 1, 16)
    kv = torch.cat([torch.tensor([1.0, -1.0] * 8) + 1e-9, torch.ones(16)]).reshape(1, 32)
    weight = torch.full((1, 16), 1.0)
    weight[0, 0] += 1e-6
    expected = X.clone()
    reference.engram_inject(expected, kv, weight, None)
    mhc_engram.engram_inject(X, kv, weight, None)
    assert_close(X[0, 0, 0], 1 + torch.sigmoid(torch.tensor(1e-3)), atol=1e-6, rtol=0)
    assert_close(X, expected, atol=1e-6, rtol=0)


def test_dead_rows_are_not_read():
    X, kv, qk, _ = problem(3, 4, 64)
    dead = torch.tensor([False, True, False])
    clean = X.clone()
    mhc_engram.engram_inject(clean, kv, qk, dead)
    kv[1] = torch.nan
    mhc_engram.engram_inject(X, kv, qk, dead)
    assert_bitwise(X, clean)


@each_isa()
def test_inject_invariance(isa):
    with kernel_core.limit_isa(isa):
        X, kv, qk, dead = problem(21, 4, 256)

        def inject(X, kv, dead):
            X = X.clone()
            mhc_engram.engram_inject(X, kv, qk, dead)
            return X

        assert_row_invariant(inject, X, kv, dead)
        assert_thread_invariant(lambda: inject(X, kv, dead))
        assert_repeatable(lambda: inject(X, kv, dead), times=5)


def test_inject_stays_in_bounds():
    X, kv, qk, dead = problem(3, 4, 48)
    guarded = Guarded((3, 4, 48))
    guarded.tensor.copy_(X)
    mhc_engram.engram_inject(guarded.tensor, at_page_end(kv), at_page_end(qk), dead)
    guarded.check("X")
    mhc_engram.engram_inject(X, kv, qk, dead)
    assert_bitwise(guarded.tensor, X)


def test_reference_backend_and_dispatcher():
    X, kv, qk, dead = problem(4, 4, 64)
    results = []
    for call in (mhc_engram.engram_inject, torch.ops.mhc_engram.engram_inject):
        results.append(X.clone())
        call(results[-1], kv, qk, dead)
    assert_bitwise(*results)
    with kernel_core.using("reference"):
        mhc_engram.engram_inject(X, kv, qk, dead)
        table, scale = table_of(9, 32)
        rows = torch.tensor([[3, -1]])
        gathered = mhc_engram.engram_gather(table, scale, rows)
    assert_close(results[0], X, atol=1e-5, rtol=1e-5)
    assert_bitwise(torch.ops.mhc_engram.engram_gather(table, scale, rows) + 0.0, gathered + 0.0)
