"""Window prefill's own device code, run by host threads: what threads exchange, index and store, not their races."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent
RING = 134


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("window")
    library = host_library(HERE / "host/window_threads.cpp", folder, HERE.parent / "csrc", HERE / "host/stub")
    library.window_prefill.argtypes = (
        [ctypes.c_void_p] * 10 + [ctypes.c_int64] * 6 + [ctypes.c_float] + [ctypes.c_int64]
    )
    return library


def build(lengths, starts, lower, heads=64):
    g = torch.Generator().manual_seed(sum(lengths))
    rows, batch = sum(lengths), len(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    return {
        "q": normal(rows, heads, 512).bfloat16(),
        "new_rows": formats.quantize_window(normal(rows, 512)),
        "ring": formats.quantize_window(normal(batch + 2, RING, 512)),
        "ring_slot": (torch.randperm(batch + 1, generator=g)[:batch] + 1).int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "start_pos": torch.tensor(starts, dtype=torch.int64),
        "lower": torch.tensor(lower, dtype=torch.int64),
        "sink": normal(heads),
        "rope": normal(rows, 64),
    }


def attend(lib, case, run_rows, window=128):
    rows, heads, _ = case["q"].shape
    batch = len(case["lower"])
    out = torch.full((rows + 2, heads, 512), 77.0, dtype=torch.bfloat16)
    out[1:-1] = torch.nan
    names = ["q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower", "sink", "rope"]
    sizes = (rows, heads, batch, batch + 2, RING, window)
    pointers = [address(case[name]) for name in names]
    assert lib.window_prefill(*pointers, address(out[1:-1]), *sizes, 512**-0.5, run_rows) == 0
    assert (out[0] == 77).all() and (out[-1] == 77).all()
    return out[1:-1]


def check(actual, case, window=128):
    rows, batch = len(case["q"]), len(case["lower"])
    with using("reference"):
        expected = mla_fp4.sparse_attention(
            **{**case, "q": case["q"].float()},
            window=window,
            pages=torch.zeros(1, 64, 288, dtype=torch.uint8),
            rows_per_block=64,
            block_table=torch.zeros(batch, 1).int(),
            indices=torch.zeros(rows, 0).int(),
            scale=512**-0.5,
        )
    # a weight is rounded to 2^-9 of itself, a result to 2^-9, and values are up to about 4
    assert_close(actual.float(), expected, atol=2e-2, rtol=2.01 / 128, max_diff=5e-6)


def test_ragged_batch(lib):
    case = build([6, 0, 19, 1], [140, 0, 0, 5000], [0, 0, 0, 4990])
    whole = attend(lib, case, 32)
    check(whole, case)
    assert_bitwise(attend(lib, case, 5), whole)


def test_two_tiles_of_heads_and_a_narrow_window(lib):
    case = build([4], [90], [80], heads=128)
    check(attend(lib, case, 2, window=100), case, window=100)


def test_a_nan_row_reaches_only_who_sees_it(lib):
    """One that the window leaves behind and one that comes."""
    case = build([10], [1000], [0])
    clean = attend(lib, case, 10)
    ring = case["ring"].clone()
    ring[case["ring_slot"][0], 877 % RING, 520] = 0xFF  # seen up to position 1004
    rows = case["new_rows"].clone()
    rows[7, -1] = 0xFF
    actual = attend(lib, {**case, "ring": ring, "new_rows": rows}, 10)
    assert actual[:5].isnan().any(-1).all() and actual[7:].isnan().any(-1).all()
    assert_bitwise(actual[5:7], clean[5:7])
