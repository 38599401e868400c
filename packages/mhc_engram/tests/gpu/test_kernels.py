"""The CUDA C++ kernels against their float32 references, and what a row may never depend on."""

from __future__ import annotations

import importlib

import pytest
import torch

import mhc_engram
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close
from mhc_engram import cuda, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GUARD = 0x5A


@pytest.fixture(autouse=True)
def _module():
    pytest.importorskip("mhc_engram._cuda")
    importlib.import_module("mhc_engram._cuda")


def guarded(*shape, dtype=torch.float32):
    """A NaN-filled tensor between rows of guard bytes, and a check that they are untouched."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for n in shape:
        count *= n
    whole = torch.full((count * size + 512,), GUARD, dtype=torch.uint8, device="cuda")
    inner = whole[256 : 256 + count * size]
    inner.fill_(0xFF)
    return inner.view(dtype).view(shape), lambda: bool((whole[:256] == GUARD).all() and (whole[-256:] == GUARD).all())


def step_on_gpu(step, shape=None, quantized=False, norm=True, update=True):
    X = step.X.cuda()
    T, n, d = X.shape
    moved = [t.cuda() for t in step.arguments()[1:]]
    y, post, comb, fn, base, scale, pre_mix, weight = moved
    outputs = [guarded(T, d), guarded(T, n), guarded(T, n), guarded(T, n, n)]
    codes = [guarded(T, d, dtype=torch.uint8), guarded(T, d // 32, dtype=torch.uint8)] if quantized else None
    cuda.hyper_connection(
        X,
        update=(y, post, comb) if update else None,
        parameters=(fn, base, scale),
        coefficients=tuple(o[0] for o in outputs[1:]),
        pre_mix=pre_mix,
        norm_weight=weight if norm else None,
        mixed=outputs[0][0],
        quantized=tuple(c[0] for c in codes) if codes else None,
        eps=1e-20,
        norm_eps=1e-20,
        hc_eps=1e-6,
        iters=20,
        shape=shape,
    )
    torch.cuda.synchronize()
    assert all(clean() for _, clean in outputs + (codes or []))
    return [X, *(o[0] for o in outputs)] + ([c[0] for c in codes] if codes else [])


def expected(step, norm=True, update=True):
    """On the CPU in float64, but for the operands."""
    moved = [t.double() for t in step.arguments()]
    X, y, post, comb, fn, base, scale, pre_mix, weight = moved
    if not update:
        y = None
    return [
        X,
        *reference.hc_step(
            X, y, post, comb, fn, base, scale, pre_mix, weight if norm else None,
            eps=1e-20, norm_eps=1e-20, hc_eps=1e-6, iters=20,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("T", "d"), [(1, 16), (1, 5120), (3, 48), (16, 512), (17, 1040), (65, 2304), (300, 5120), (1200, 512), (5, 7168)]
)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("update", [True, False])
def test_step(make_step, T, d, norm, update):
    step = make_step(T, d)
    made = step_on_gpu(step, norm=norm, update=update)
    for name, actual, wanted in zip(
        ("X", "mixed", "pre", "post", "comb"), made, expected(step, norm, update), strict=True
    ):
        assert_close(actual.cpu(), wanted.float(), atol=1e-5, rtol=1e-5, name=name)


def test_all_cuts_of_a_launch_give_the_same_bits(make_step):
    step = make_step(37, 1024)
    first = step_on_gpu(step)
    for cluster in (1, 2, 4, 8, 16):
        for tile in (1, 3, 8, 16):
            for warps in (4, 8):
                if cluster == 1 and tile > 8:
                    continue  # shared memory
                for a, b in zip(step_on_gpu(step, (cluster, tile, warps)), first, strict=True):
                    assert_bitwise(a, b)


@pytest.mark.parametrize(("T", "d"), [(1, 48), (37, 1024), (1, 5120), (37, 5120), (700, 5120), (3001, 5120)])
@pytest.mark.parametrize("update", [True, False])
def test_clusters_that_stay_give_the_same_bits(make_step, T, d, update):
    step = make_step(T, d)
    quantized = d % 32 == 0
    first = step_on_gpu(step, (4, 8, 8), quantized, update=update)
    shapes = [(4, 3, 8, 1), (4, 16, 8, 1), (8, 7, 8, 1), (8, 16, 8, 1), (16, 16, 8, 1)]
    if d == 5120:
        shapes += [(8, 17, 8, 1), (8, 32, 8, 1), (8, 33, 8, 1), (8, 48, 8, 1), (16, 9, 8, 2), (16, 32, 8, 2)]
    for shape in shapes:
        for a, b in zip(step_on_gpu(step, shape, quantized, update=update), first, strict=True):
            assert_bitwise(a, b)


def test_a_row_is_its_own(make_step):
    step = make_step(70, 5120)
    whole = step_on_gpu(step)
    for rows in (slice(0, 1), slice(69, 70), slice(13, 40)):
        part = make_step(70, 5120)
        for name in ("X", "y", "post", "comb", "pre_mix"):
            setattr(part, name, getattr(step, name)[rows].clone())
        for a, b in zip(step_on_gpu(part), whole, strict=True):
            assert_bitwise(a, b[rows])
    bad = make_step(70, 5120)
    bad.X[13, 2, 77], bad.y[14, 5], bad.X[15] = float("nan"), float("inf"), 3e38
    keep = [i for i in range(70) if i not in (13, 14, 15)]
    for a, b in zip(step_on_gpu(bad), whole, strict=True):
        assert_bitwise(a[keep], b[keep])


def test_parts_in_turn_equal_the_whole(make_step):
    step = make_step(33, 2304)
    X, y, post, comb, fn, base, scale, pre, weight = (t.cuda() for t in step.arguments())
    whole = X.clone()
    x, *made = mhc_engram.hc_step(whole, y, post, comb, fn, base, scale, pre, weight)
    mhc_engram.hc_update(X, y, post, comb)
    assert_bitwise(X, whole)
    assert_bitwise(mhc_engram.hc_mix(X, pre, weight), x)
    for a, b in zip(mhc_engram.hc_coefficients(X, fn, base, scale), made, strict=True):
        assert_bitwise(a, b)


def test_in_place_coefficients(make_step):
    step = make_step(20, 512)
    X, y, post, comb, fn, base, scale, pre, weight = (t.cuda() for t in step.arguments())
    x, *made = mhc_engram.hc_step(X.clone(), y, post, comb, fn, base, scale, pre, weight)
    out = torch.full_like(x, float("nan"))
    again = mhc_engram.hc_step(X, y, post, comb, fn, base, scale, pre, weight, out=out, coefficients=(pre, post, comb))
    assert again[0] is out and again[1] is pre
    for a, b in zip(again, (x, *made), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize(("T", "d"), [(1, 512), (40, 5120), (9, 2304)])
def test_codes(make_step, T, d):
    made = step_on_gpu(make_step(T, d), quantized=True)
    rows = torch.cat((made[5], made[6]), 1).cpu()
    assert_bitwise(rows, formats.quantize_window(made[1].cpu()))


def test_repeats(make_step):
    step = make_step(150, 5120)
    first = step_on_gpu(step)
    for _ in range(20):
        for a, b in zip(step_on_gpu(step), first, strict=True):
            assert_bitwise(a, b)


def test_no_tokens(make_step):
    step = make_step(0, 512)
    for value in step_on_gpu(step):
        assert value.shape[0] == 0


def test_graph(make_step):
    step = make_step(12, 1024)
    X, y, post, comb, fn, base, scale, pre, weight = (t.cuda() for t in step.arguments())
    start = X.clone()
    wanted = mhc_engram.hc_step(X, y, post, comb, fn, base, scale, pre, weight)
    X.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = mhc_engram.hc_step(X, y, post, comb, fn, base, scale, pre, weight)
    for _ in range(3):
        X.copy_(start)
        graph.replay()
        for a, b in zip(made, wanted, strict=True):
            assert_bitwise(a, b)


@pytest.mark.parametrize("lengths", [[1], [3, 0, 5, 1, 0], [0, 0], [500, 1, 77], [1] * 300])
def test_engram_rows(lengths):
    T, orders, heads = sum(lengths), 3, 8
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    mapped, dead = torch.randint(0, 2**46, (T,)), torch.rand(T) < 0.2
    history = torch.randint(-1, 99092, (len(lengths), orders))
    multipliers = mhc_engram.engram_multipliers(14, 99092)
    primes = mhc_engram.engram_primes(1, orders, heads, 16_000_000).flatten()
    arguments = (mapped, dead, history, cu, multipliers, primes, mhc_engram.engram_offsets(primes))
    with using("reference"):
        wanted = mhc_engram.engram_rows(*arguments, 7)
    assert_bitwise(mhc_engram.engram_rows(*(a.cuda() for a in arguments), 7).cpu(), wanted)


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize(("T", "C", "dim"), [(0, 3, 32), (1, 1, 32), (5, 24, 256), (300, 24, 256), (7, 3, 160)])
def test_engram_gather(place, T, C, dim):
    R = 5000
    table = torch.randint(0, 256, (R, dim)).to(torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.randint(0, 256, (R, dim // 32)).to(torch.uint8)
    rows = torch.randint(-1, R, (T, C))
    if T:
        rows[0, 0], rows[-1, -1] = -1, R - 1
    with using("reference"):
        wanted = mhc_engram.engram_gather(table, scale, rows)
    there = [t.cuda() if place == "device" else t.pin_memory() for t in (table, scale)]
    out, clean = guarded(T, C * dim)
    mhc_engram.engram_gather(*there, rows.cuda(), out=out)
    torch.cuda.synchronize()
    assert clean()
    assert_bitwise(out.nan_to_num(nan=77.0, posinf=1e38).cpu(), wanted.nan_to_num(nan=77.0, posinf=1e38))
    if place == "pinned":
        with pytest.raises(ValueError, match="not pinned"):
            mhc_engram.engram_gather(table, scale, rows.cuda())
    if T > 1:
        for blocks in (1, 7):
            again = cuda.engram_gather(*there, rows.cuda(), None, blocks=blocks)
            assert_bitwise(again.nan_to_num(nan=77.0, posinf=1e38), out.nan_to_num(nan=77.0, posinf=1e38))


@pytest.mark.parametrize(
    ("T", "n", "d"), [(0, 4, 32), (1, 4, 16), (5, 4, 5120), (7, 4, 2304), (3, 2, 8192), (9, 1, 48)]
)
def test_engram_inject(T, n, d):
    X, kv, weight = torch.randn(T, n, d), torch.randn(T, (n + 1) * d), torch.rand(n, d)
    dead = torch.rand(T) < 0.3
    if T > 4:
        X[1], kv[2] = 0, 0
        X[3, 0, 7] = float("nan")
        dead[1:4] = False
    wanted = X.double()
    reference.engram_inject(wanted, kv.double(), weight.double(), dead)
    made = X.cuda()
    arguments = kv.cuda(), weight.cuda(), dead.cuda()
    mhc_engram.engram_inject(made, *arguments)
    assert_close(made.cpu(), wanted.float(), atol=2e-6, rtol=2e-6)
    assert_bitwise(made.cpu()[dead], X[dead])
    for i in range(0, T, 4):
        alone = X[i : i + 1].cuda()
        mhc_engram.engram_inject(alone, *(a[i : i + 1].contiguous() if a.shape[0] == T else a for a in arguments))
        if n != T:
            assert_bitwise(alone, made[i : i + 1])


def test_bad_arguments_write_nothing(make_step):
    module = importlib.import_module("mhc_engram._cuda")
    X = make_step(4, 64).X.cuda()
    before, stream = X.clone(), torch.cuda.current_stream().cuda_stream
    at = X.data_ptr()
    cases = [
        {"channels": 40},
        {"streams": at + 4},
        {"cluster": 3},
        {"tile": 17},
        {"warps": 6},
        {"stay": 3},
        {"stay": 1},  # one CTA
        {"stay": 1, "cluster": 8, "tile": 17},
        {"stay": 2, "cluster": 16},
        {"post": 0},
        {"y": 0},
    ]
    good = {"tokens": 4, "channels": 64, "streams": at, "y": at, "post": at, "comb": at, "cluster": 1, "tile": 4,
            "warps": 8}  # fmt: skip
    for case in cases:
        with pytest.raises(ValueError, match="hc_step"):
            module.hc_step(**(good | case), stream=stream)
    with pytest.raises(ValueError, match="engram_inject"):
        module.engram_inject(4, 4, 8208, at, at, at, 0, 1e-20, stream)
    with pytest.raises(ValueError, match="engram_gather"):
        module.engram_gather(4, 48, 4, at, at, at, at, 0, stream)
    torch.cuda.synchronize()
    assert_bitwise(X, before)
