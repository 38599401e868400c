"""The kernels' own device code, run by host threads: what threads exchange, index and store, not their races."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import mhc_engram
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.host import address, host_library
from mhc_engram import reference

HERE = Path(__file__).parent
THREADS = HERE.parents[1] / "mla_fp4" / "tests" / "host"


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    if not (THREADS / "threads.hpp").is_file():
        pytest.skip("needs the checkout: a block on host threads stands in mla_fp4's tests")
    folder = tmp_path_factory.mktemp("hc")
    library = host_library(HERE / "host/hc_threads.cpp", folder, HERE.parent / "csrc", HERE / "host/stub", THREADS)
    library.hc_threads.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_int] * 6 + [ctypes.c_void_p] * 15
    library.engram_gate_host.argtypes = [ctypes.c_float] * 3 + [ctypes.c_int64, ctypes.c_float]
    library.engram_gate_host.restype = ctypes.c_float
    return library


def at(tensor):
    return None if tensor is None else tensor.data_ptr()


def run(lib, step, parts, tile, *, cluster=1, warps=4, stay=0, clusters=0, norm=True, quantized=False):
    X = step.X.clone()
    T, n, d = X.shape
    nan = float("nan")
    pre, post, comb = torch.full((T, n), nan), torch.full((T, n), nan), torch.full((T, n, n), nan)
    mixed = torch.full((T, d), nan)
    codes = torch.full((T, d), 0x55, dtype=torch.uint8) if quantized else None
    scales = torch.full((T, max(1, d // 32)), 0x55, dtype=torch.uint8) if quantized else None
    done = lib.hc_threads(
        T, d, parts, cluster, tile, warps, stay, clusters, at(X), at(step.y), at(step.post), at(step.comb), at(step.fn),
        at(step.base), at(step.scale), at(pre), at(post), at(comb), at(step.pre_mix),
        at(step.norm_weight) if norm else None, at(mixed), at(codes), at(scales),
    )  # fmt: skip
    assert done == 0
    return X, mixed, (pre, post, comb), codes, scales


@pytest.mark.parametrize(("T", "d", "tile"), [(1, 16, 1), (3, 48, 2), (5, 256, 16), (9, 1040, 8)])
def test_the_whole_step(lib, make_step, T, d, tile):
    step = make_step(T, d)
    quantized = d % 32 == 0
    X, mixed, made, codes, scales = run(lib, step, 7, tile, quantized=quantized)
    expected_X = step.X.clone()
    x, *coefficients = reference.hc_step(expected_X, *step.arguments()[1:])
    assert_close(X, expected_X, atol=2e-6, rtol=2e-6)
    assert_close(mixed, x, atol=4e-6, rtol=4e-6)
    for actual, expected in zip(made, coefficients, strict=True):
        assert_close(actual, expected, atol=5e-6, rtol=5e-6)
    if quantized:
        rows = formats.quantize_window(mixed)
        assert_bitwise(torch.cat((codes, scales), 1), rows)


def test_parts_alone_and_any_cut_give_the_same_bits(lib, make_step):
    step = make_step(4, 96)
    X, mixed, made, *_ = run(lib, step, 7, 16)
    for cluster, tile, warps in ((1, 1, 4), (1, 3, 8), (2, 3, 4), (2, 16, 8), (4, 2, 4), (16, 16, 4)):
        again = run(lib, step, 7, tile, cluster=cluster, warps=warps)
        for a, b in zip((X, mixed, *made), (again[0], again[1], *again[2]), strict=True):
            assert_bitwise(a, b)
    updated = run(lib, step, 1, 2)[0]
    assert_bitwise(updated, X)
    step.X = updated
    assert_bitwise(run(lib, step, 4, 2)[1], mixed)
    for a, b in zip(run(lib, step, 2, 2)[2], made, strict=True):
        assert_bitwise(a, b)
    plain = run(lib, step, 4, 2, norm=False)[1]
    assert_close(plain, reference.hc_mix(updated, step.pre_mix, None), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("T", "d", "parts", "tile", "cluster", "stay", "clusters"),
    [
        (7, 64, 7, 3, 4, 1, 1),  # three tiles of one cluster, most warps without a chunk
        (7, 64, 6, 2, 4, 1, 2),  # four tiles of two clusters, no update
        (44, 96, 7, 20, 8, 1, 1),  # two groups of 16 tokens, and a last tile of 4
        (41, 1040, 7, 20, 4, 1, 2),  # a unit with two chunks
        (70, 64, 7, 35, 4, 1, 1),  # three groups
        (27, 96, 7, 20, 4, 2, 1),  # fn in shared memory, a half of the tile to each half of the warps
    ],
)
def test_clusters_that_stay_give_the_same_bits(lib, make_step, T, d, parts, tile, cluster, stay, clusters):
    step = make_step(T, d)
    quantized = d % 32 == 0
    wanted = run(lib, step, parts, 8, quantized=quantized)
    made = run(lib, step, parts, tile, cluster=cluster, stay=stay, clusters=clusters, quantized=quantized)
    for a, b in zip((*made[:2], *made[2], *made[3:]), (*wanted[:2], *wanted[2], *wanted[3:]), strict=True):
        if b is not None:
            assert_bitwise(a, b)


def test_bad_values_stay_in_their_row(lib, make_step):
    step = make_step(3, 64)
    clean = run(lib, step, 7, 16)
    step.X[1, 2, 5] = float("nan")
    X, mixed, made, *_ = run(lib, step, 7, 16)
    for value, before in zip((X, mixed, *made), (clean[0], clean[1], *clean[2]), strict=True):
        assert_bitwise(value[::2], before[::2])
    assert mixed[1].isnan().all() and all(value[1].isnan().all() for value in made)
    step.X[1] = 0
    step.y[1] = 0
    X, mixed, made, *_ = run(lib, step, 7, 16)
    assert (mixed[1] == 0).all() and all(value[1].isfinite().all() for value in made)


@pytest.mark.parametrize("channels", [16, 32, 512, 1024, 1040, 2304, 5120, 7168, 16384])
def test_plans(lib, channels):
    for cluster in (1, 2, 4, 8, 16):
        assert lib.hc_covers(ctypes.c_int64(channels), cluster)
    for tokens in (1, 2, 7, 64, 256, 257, 513, 4096, 10**6):
        chosen = (ctypes.c_int * 4)()
        lib.hc_chosen(*map(ctypes.c_int64, (tokens, channels, 132)), chosen)
        assert chosen[2] and 1 <= chosen[1] <= (48 if chosen[3] else 16)


def test_engram_rows(lib):
    g = torch.Generator().manual_seed(3)
    lengths = [2, 0, 5, 1, 12]
    T, orders, heads = sum(lengths), 3, 8
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    mapped, dead = torch.randint(0, 2**46, (T,), generator=g), torch.rand(T, generator=g) < 0.2
    history = torch.randint(-1, 99092, (len(lengths), orders), generator=g)
    multipliers = torch.cat((mhc_engram.engram_multipliers(1, 99092)[:3], torch.tensor([2**62 + 1])))
    primes = mhc_engram.engram_primes(1, orders, heads, 16_000_000).flatten()
    offsets = mhc_engram.engram_offsets(primes)
    out = torch.empty(T, orders * heads, dtype=torch.int64)
    sizes = [ctypes.c_int64(v) for v in (T, len(lengths), orders, heads)]
    lib.engram_rows_host(
        *sizes, address(mapped), address(dead), address(history), address(cu), address(multipliers), address(primes),
        address(offsets), ctypes.c_int64(77), address(out),
    )  # fmt: skip
    with using("reference"):
        expected = mhc_engram.engram_rows(mapped, dead, history, cu, multipliers, primes, offsets, 77)
    assert_bitwise(out, expected)


def test_engram_gate(lib):
    for dot in (0.0, 1e-9, -1e-9, 3.0, -3.0, 1e30):
        got = lib.engram_gate_host(dot, 5.0, 7.0, 64, 1e-20)
        scaled = torch.tensor(dot) * torch.rsqrt(torch.tensor(5.0 / 64)) * torch.rsqrt(torch.tensor(7.0 / 64)) / 8
        expected = torch.sigmoid(scaled.sign() * scaled.abs().clamp(min=1e-6).sqrt())
        assert abs(got - expected.item()) < 1e-6
    assert lib.engram_gate_host(float("nan"), 5.0, 7.0, 64, 1e-20) != lib.engram_gate_host(0.0, 5.0, 7.0, 64, 1e-20)
