"""The FP8 product's own device code, run by host threads: what threads exchange, index and store, not their races."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch

from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.host import host_library
from mega_moe import reference
from mega_moe.cuda import linear as cuda_linear

HERE = Path(__file__).parent
THREADS = HERE.parents[1] / "mla_fp4" / "tests" / "host"


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    if not (THREADS / "threads.hpp").is_file():
        pytest.skip("needs the checkout: a block on host threads stands in mla_fp4's tests")
    folder = tmp_path_factory.mktemp("linear")
    library = host_library(HERE / "host/linear_threads.cpp", folder, HERE.parent / "csrc", HERE / "host/stub", THREADS)
    library.linear_host.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_void_p] * 4 + [ctypes.c_int] * 3
    library.split_host.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.slices_cover.argtypes = [ctypes.c_int64, ctypes.c_int]
    return library


def build(tokens, groups, rows, columns, seed=0):
    g = torch.Generator().manual_seed(seed + tokens + rows)
    x = torch.randn(tokens, groups, columns, generator=g)
    weight = torch.randint(0, 256, (groups * rows, columns), generator=g).to(torch.uint8)
    weight[weight & 0x7F == 0x7F] = 0
    scale = torch.randint(110, 140, (-(-groups * rows // 32), columns // 32), generator=g).to(torch.uint8)
    return x, weight, scale


def run(lib, x, weight, scale, terms=3, warps=4, cluster=1):
    tokens, groups, columns = x.shape
    rows = len(weight) // groups
    out = torch.full((tokens, groups, rows), math.nan)
    at = [t.data_ptr() for t in (x, weight, scale, out)]
    assert lib.linear_host(tokens, groups, rows, columns, *at, terms, cluster, warps) == 0
    return out


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "columns", "terms", "warps", "cluster"),
    [
        (1, 1, 1, 64, 3, 4, 1),
        (3, 1, 130, 128, 3, 4, 2),
        (9, 2, 64, 448, 2, 4, 4),
        (8, 1, 300, 64, 1, 8, 1),
        (19, 1, 33, 320, 3, 4, 2),
        (2, 1, 70, 1024, 3, 8, 4),
        (7, 1, 70, 1408, 3, 2, 2),
        (5, 1, 70, 192, 3, 4, 1),
        (1, 1, 40, 5120, 1, 2, 8),
    ],
)
def test_products(lib, tokens, groups, rows, columns, terms, warps, cluster):
    x, weight, scale = build(tokens, groups, rows, columns)
    if terms < 3:
        x = x.bfloat16().float()
    out = run(lib, x, weight, scale, terms, warps, cluster)
    matrix = reference.dequantize(weight.view(torch.float8_e4m3fn), scale).double().unflatten(0, (groups, -1))
    expected = torch.einsum("tgi,goi->tgo", x.double(), matrix)
    bound = torch.einsum("tgi,goi->tgo", x.double().abs(), matrix.abs())
    assert ((out.double() - expected).abs() <= 2e-6 * bound).all()


def test_a_row_is_its_own_and_special_values_stay_in_it(lib):
    x, weight, scale = build(7, 1, 70, 192)
    out = run(lib, x, weight, scale)
    for t in (0, 6):
        assert_bitwise(run(lib, x[t : t + 1].contiguous(), weight, scale), out[t : t + 1])
    assert_bitwise(run(lib, torch.cat((x, x, x[:2])), weight, scale)[7:14], out)
    x[3, 0, 100] = math.nan
    weight[5, 17] = 0xFF
    scale[2, 1] = 255
    again = run(lib, x, weight, scale)
    assert again[3].isnan().all() and again[:, :, 5].isnan().all() and again[:, :, 64:70].isnan().all()
    keep = [r for r in range(64) if r != 5]
    assert_bitwise(again[[0, 1, 2, 4, 5, 6]][:, :, keep], out[[0, 1, 2, 4, 5, 6]][:, :, keep])


def test_every_code_and_scale(lib):
    codes = torch.arange(256).to(torch.uint8)
    weight = torch.zeros(256, 64, dtype=torch.uint8)
    weight[:, 37] = codes
    x = torch.zeros(1, 1, 64)
    x[0, 0, 37] = 1.0
    for byte in (3, 60, 127, 134, 135, 200, 240):
        scale = torch.full((8, 2), byte, dtype=torch.uint8)
        expected = reference.dequantize(weight.view(torch.float8_e4m3fn), scale)[:, 37]
        # The other products are 0, which a sum keeps exactly; the sign of a zero is free.
        assert_close(run(lib, x, weight, scale, 1)[0, 0], expected, atol=0, rtol=0)


def test_terms(lib):
    x = torch.cat((torch.randn(500) * torch.logspace(-20, 20, 500), torch.tensor([0.0, math.inf, -math.inf, math.nan])))
    out = torch.empty(len(x), 3)
    lib.split_host(x.data_ptr(), len(x), out.data_ptr())
    assert_bitwise(out.double().sum(1).float()[:501], x[:501])
    assert out[501, 0] == math.inf and out[502, 0] == -math.inf and out[503, 0].isnan() and (out[501:, 1:] == 0).all()
    assert_bitwise(out[:503, 0], x[:503].bfloat16().float())


@pytest.mark.parametrize("columns", [64, 128, 512, 576, 2304, 5120, 6144])
def test_slices(lib, columns):
    assert all(lib.slices_cover(columns, cluster) for cluster in (1, 2, 4, 8))


@pytest.mark.parametrize("columns", [64, 128, 576, 1536, 2304, 5120, 6144, 16384, 32768])
def test_a_cut_is_found_for_any_size(lib, columns):
    for tokens in (1, 3, 8, 9, 16, 17, 64, 65, 4096):
        for rows in (32, 512, 1536, 5120, 32768):
            for terms in (1, 3):
                out = (ctypes.c_int * 4)()
                sizes = map(ctypes.c_int64, (tokens, 1, rows, columns))
                lib.linear_chosen(*sizes, terms, cuda_linear.cluster(columns), out)
                assert out[3] and out[1] >= 8
    out = (ctypes.c_int * 4)()
    lib.linear_chosen(*map(ctypes.c_int64, (1, 1, 5120, 5120)), 1, 8, out)
    assert list(out) == [4, 8, 8, 1]  # all weights of a CTA are on their way at once
    lib.linear_chosen(*map(ctypes.c_int64, (1, 1, 512, 5120)), 1, 8, out)
    assert list(out) == [2, 8, 8, 1]  # few rows: more and smaller CTAs
