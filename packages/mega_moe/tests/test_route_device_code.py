"""The router's own device code, run by host threads: what threads exchange, index and store, not their races."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch

from kernel_core.testing import assert_close
from kernel_core.testing.host import host_library
from mega_moe import reference

HERE = Path(__file__).parent
THREADS = HERE.parents[1] / "mla_fp4" / "tests" / "host"


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    if not (THREADS / "threads.hpp").is_file():
        pytest.skip("needs the checkout: a block on host threads stands in mla_fp4's tests")
    folder = tmp_path_factory.mktemp("route")
    library = host_library(HERE / "host/route_threads.cpp", folder, HERE.parent / "csrc", HERE / "host/stub", THREADS)
    pointers, sizes = ctypes.c_void_p, ctypes.c_int64
    library.route_host.argtypes = [sizes] * 3 + [pointers] * 4 + [ctypes.c_float] + [pointers] * 2
    library.permute_host.argtypes = [sizes] * 3 + [pointers] + [ctypes.c_int] * 2 + [pointers] * 2
    return library


def route(lib, logits, bias, top_k, bias_vl=None, is_image=None, scale=1.5):
    ids = torch.full((len(logits), top_k), -9, dtype=torch.int32)
    weights = torch.full((len(logits), top_k), math.nan)
    at = [None if t is None else t.data_ptr() for t in (logits, bias, bias_vl, is_image)]
    lib.route_host(*logits.shape, top_k, *at, scale, ids.data_ptr(), weights.data_ptr())
    return ids, weights


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (12, 2), (17, 17), (128, 3), (130, 4), (384, 6), (500, 32)])
def test_router(lib, experts, top_k):
    g = torch.Generator().manual_seed(experts)
    logits, bias, bias_vl = (torch.randn(*s, generator=g) for s in ((30, experts), (experts,), (experts,)))
    logits *= 4
    is_image = torch.arange(30) % 3 == 0
    ids, weights = route(lib, logits, bias, top_k, bias_vl, is_image)
    expected_ids, expected = reference.route(logits, bias, top_k, bias_vl=bias_vl, is_image=is_image)
    same = (ids == expected_ids).all(1)
    assert same.float().mean() > 0.9
    assert_close(weights[same], expected[same], atol=1e-7, rtol=4e-6)


def test_scores(lib):
    x = torch.cat((torch.linspace(-170, 170, 401), torch.linspace(-2, 2, 400), torch.tensor([1e4, 1e30, 0.0, -0.0])))
    logits = torch.stack((x, x + 0.25), dim=1)
    ids, weights = route(lib, logits, torch.zeros(2), 2, scale=1.0)
    y = logits.double()
    exact = torch.where(y < -30, torch.exp(y / 2), torch.log1p(torch.exp(-y.abs())).add(y.clamp_min(0)).sqrt())
    score = exact.gather(1, ids.long())
    assert_close(weights, score / (score.sum(1, keepdim=True) + 1e-20), atol=0, rtol=4e-6)


def test_ties_and_special_values(lib):
    logits = torch.zeros(3, 40)
    logits[1, 30:] = 1.0
    logits[2, [5, 35]] = 2.0
    ids, weights = route(lib, logits, torch.zeros(40), 4)
    assert ids.tolist() == [[0, 1, 2, 3], [30, 31, 32, 33], [5, 35, 0, 1]]
    assert torch.equal(weights[0], torch.full((4,), 0.375))
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0, nan, 2.0], [nan] * 4, [-inf, -inf, -inf, -300.0], [nan, nan, nan, 1.0]])
    ids, weights = route(lib, logits, torch.zeros(4), 2)
    assert ids.tolist() == [[3, 1], [0, 1], [0, 1], [3, 0]]
    assert weights[0].isfinite().all() and weights[1].isnan().all() and weights[3].isnan().all()
    assert torch.equal(weights[2], torch.zeros(2))


def expected_permutation(ids, experts, shared):
    flat = ids.flatten().long()
    lists = [torch.where(flat == e)[0] for e in range(experts)]
    if shared:
        lists.append(torch.arange(len(ids)) + flat.numel())
    offsets = torch.tensor([0, *(len(x) for x in lists)]).cumsum(0).int()
    return offsets, torch.cat(lists).int()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "warps"),
    [(0, 3, 2, 8), (1, 1, 1, 8), (5, 7, 2, 8), (99, 48, 6, 8), (3000, 33, 6, 16)],
)
def test_permutation(lib, tokens, experts, top_k, warps, shared):
    g = torch.Generator().manual_seed(tokens)
    for kind in ("random", "hot", "none"):
        ids = torch.randint(-1, experts, (tokens, top_k), generator=g, dtype=torch.int32)
        if kind == "hot":
            ids[:, 0] = experts - 1
        if kind == "none":
            ids[:] = -1
        offsets = torch.full((experts + shared + 1,), -5, dtype=torch.int32)
        rows = torch.full((tokens * (top_k + shared),), -5, dtype=torch.int32)
        lib.permute_host(
            tokens, experts, top_k, ids.data_ptr(), int(shared), warps, offsets.data_ptr(), rows.data_ptr()
        )
        expected_offsets, expected = expected_permutation(ids, experts, shared)
        assert torch.equal(offsets, expected_offsets)
        assert torch.equal(rows[: len(expected)], expected) and (rows[len(expected) :] == -1).all()
