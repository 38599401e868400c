"""Window prefill for Hopper, as far as it is arithmetic: runs, the key ring, the layouts of one row."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_close
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent
SLOTS = 144


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    library = host_library(HERE / "host" / "window_plan.cpp", tmp_path_factory.mktemp("host"), HERE.parent / "csrc")
    i32, i64, u32, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
    library.window_run.argtypes, library.window_run.restype = [i64] * 4, i64
    library.items.argtypes, library.items.restype = [i64] * 3, i64
    library.find.argtypes = [pointer, i32, u32, u32, pointer]
    library.seen.argtypes = [i64, i64, i32, i32]
    library.wild.argtypes, library.wild.restype = [u32], ctypes.c_bool
    library.fits.argtypes, library.fits.restype = [i64] * 7, ctypes.c_bool
    run = [pointer] * 3 + [i64] * 6 + [i32, ctypes.c_float] + [pointer] * 3
    library.attend_run.argtypes = run
    return library


@pytest.mark.parametrize("run_rows", [1, 2, 7, 32, 64, 5000])
@pytest.mark.parametrize(
    "lengths", [[1], [0, 0, 3, 0], [4096], [1] * 40, [32] * 128, [31, 33, 0, 64, 65, 1, 0, 200], [0, 1, 0]]
)
def test_every_row_is_in_one_run(lib, lengths, run_rows):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    batch, rows = len(lengths), sum(lengths)
    taken = torch.zeros(rows, dtype=torch.int32)
    found = torch.empty(3, dtype=torch.int32)
    sizes = [[] for _ in lengths]
    for item in range(lib.items(rows, batch, run_rows)):
        lib.find(address(cu), batch, run_rows, item, address(found))
        request, first, count = found.tolist()
        if count:
            assert cu[request] <= first and first + count <= cu[request + 1] and count <= run_rows
            taken[first : first + count] += 1
            sizes[request].append(count)
    assert (taken == 1).all()
    assert all(max(s) - min(s) <= 1 for s in sizes if s)


def test_run_lengths(lib):
    assert lib.window_run(1, 64, 1, 132) == lib.window_run(128, 64, 128, 132) == 1
    assert lib.window_run(4096, 64, 1, 132) == 32 and lib.window_run(16384, 64, 1, 132) == 125
    assert lib.window_run(4096, 128, 1, 132) == 63 and lib.window_run(16384, 128, 1, 132) == 125
    assert lib.window_run(4096, 64, 128, 132) == 32 and lib.window_run(16384, 64, 5, 132) == 32
    assert lib.window_run(10**6, 64, 5, 132) == 64


def test_ages(lib):
    for own in range(SLOTS):
        ages = [lib.age(own, slot) for slot in range(SLOTS)]
        assert ages == [(own - slot) % SLOTS for slot in range(SLOTS)]
        for column in (0, 2, 4, 6):  # a thread's own slot may lie below 0
            assert [lib.age(own - column, slot - column) for slot in range(column, SLOTS)] == ages[column:]


def test_seen(lib):
    for position in (0, 5, 127, 128, 2**40):
        for lower in (-3, 0, 1, 100, 2**40 - 7, 2**50):
            for window in (1, 100, 128):
                for index in (0, 1, 200):
                    expected = max(0, min(window, position + index - max(0, lower) + 1))
                    if abs(position - lower) < 2**28 or lower <= 0:
                        assert lib.seen(position, lower, index, window) == expected
    assert lib.seen(0, 2**50, 1000, 128) == 0


def test_wild_scales(lib):
    for byte in range(256):
        for at in range(4):
            assert lib.wild(byte << 8 * at) == (byte >= 240)
        values = torch.full((1, 528), 0x7E, dtype=torch.uint8)  # 448, the largest
        values[:, 512:] = byte
        if byte < 240:
            assert formats.dequantize_window(values).bfloat16().isfinite().all()


def test_places(lib):
    """Each unit's words go where a reader by place looks, and eight lanes read from eight banks' columns."""
    columns = [lib.column_of(place) for place in range(512)]
    assert sorted(columns) == list(range(512))
    for slot in (0, 5, 143):
        for unit in range(32):
            for j in range(4):
                at = lib.target(slot, unit, j)
                assert at % 8 == 0 and at // (SLOTS * 128) == unit // 4 and at % (SLOTS * 128) // 128 == slot
    for first in range(0, 64, 2):
        for g in (0, 1):
            pieces = {lib.fragment(first + lane // 4, lane % 4, g) // 16 % 8 for lane in range(8)}
            assert len(pieces) == 8


def test_refuses(lib):
    good = (10, 64, 2, 3, 134, 128, 32)
    assert lib.fits(*good) and lib.fits(10, 128, 2, 3, 128, 128, 1) and lib.fits(0, 64, 0, 3, 134, 1, 1)
    for at, value in [(0, 2**31), (0, -1), (1, 32), (1, 0), (2, 0), (3, 0), (4, 127), (5, 0), (5, 129), (6, 0)]:
        assert not lib.fits(*good[:at], value, *good[at + 1 :])


@pytest.mark.parametrize(
    ("start", "lower", "window", "rows", "runs"),
    [
        (0, 0, 128, 3, [(0, 3)]),
        (0, 0, 128, 150, [(0, 2), (140, 10), (126, 5)]),
        (1000, 0, 128, 20, [(0, 20)]),
        (2**33 + 5, 2**33 - 20, 100, 20, [(0, 9), (9, 11)]),
        (50, 60, 128, 20, [(0, 20)]),
        (5, 1000, 128, 2, [(0, 2)]),
        (7, 0, 1, 12, [(0, 12)]),
    ],
)
@pytest.mark.parametrize("ahead", [0, 7])
def test_runs_match_reference(lib, start, lower, window, rows, runs, ahead):
    """The ring, the columns' other order, the masks, the turn of the output: one request in a few runs."""
    g = torch.Generator().manual_seed(rows)
    heads, size = 64, 134
    q = torch.randn(rows, heads, 512, generator=g).bfloat16()
    new, ring = (formats.quantize_window(torch.randn(*s, 512, generator=g)) for s in ((rows,), (1, size)))
    sink, rope = torch.randn(heads, generator=g), torch.randn(rows, 64, generator=g)
    out = torch.full((rows, heads, 512), torch.nan)
    with using("reference"):
        expected = mla_fp4.sparse_attention(
            q=q.float(),
            new_rows=new,
            ring=ring,
            ring_slot=torch.zeros(1).int(),
            cu_seqlens=torch.tensor([0, rows]).int(),
            start_pos=torch.tensor([start]),
            lower=torch.tensor([lower]),
            window=window,
            pages=torch.zeros(1, 64, 288, dtype=torch.uint8),
            rows_per_block=64,
            block_table=torch.zeros(1, 1).int(),
            indices=torch.zeros(rows, 0).int(),
            sink=sink,
            rope=rope,
            scale=512**-0.5,
        )
    for first, count in runs:
        lib.attend_run(
            address(q), address(new), address(ring), size, start, lower, window, first, count, ahead, 512**-0.5,
            address(sink), address(rope), address(out),
        )  # fmt: skip
        part = slice(first, first + count)
        # a weight is rounded to 2^-9 of itself, and values are up to about 4
        assert_close(out[part], expected[part], atol=1e-2, rtol=2.01 / 128, max_diff=5e-6)
