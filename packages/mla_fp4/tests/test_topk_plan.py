"""The GPU selection's arithmetic and its walk over a row, on the host."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kernel_core.testing.host import host_library
from mla_fp4.reference.indexer import select_top

HERE = Path(__file__).parent
TILE, CAPACITY = 64, 48  # small ones reach every path


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    lib = host_library(HERE / "host" / "topk_plan.cpp", tmp_path_factory.mktemp("topk"), HERE.parent / "csrc/cuda/sm90")
    lib.order_key.argtypes, lib.order_key.restype = [ctypes.c_float], ctypes.c_uint32
    for name, count in (("merged_length", 3), ("candidate_length", 4)):
        getattr(lib, name).argtypes = [ctypes.c_int64] * count
        getattr(lib, name).restype = ctypes.c_int64
    lib.position_shift.argtypes = [ctypes.c_int64]
    lib.select_row.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p]
    return lib


def walk(library, scores, k, tile=TILE, capacity=CAPACITY, backwards=False):
    scores = scores.contiguous()
    out = torch.full((1, k), -1, dtype=torch.int32)
    cuts = ctypes.c_int()
    count = library.select_row(
        scores.data_ptr(), len(scores), k, tile, capacity, backwards, out.data_ptr(), ctypes.byref(cuts)
    )
    assert count == min(k, len(scores))
    return out, cuts.value


def expected(scores, k):
    return select_top(scores.unsqueeze(0), torch.tensor([len(scores)]), k)


def test_keys_have_the_order_of_the_floats(library):
    bits = np.concatenate([np.arange(0, 1 << 32, 99_991, dtype=np.uint64), [0, 1 << 31, 0x7F800000, 0xFF800000]])
    values = bits.astype(np.uint32).view(np.float32)
    values = np.sort(values[~np.isnan(values)])
    keys = np.array([library.order_key(v) for v in values], dtype=np.int64)
    assert ((np.diff(keys) > 0) == (np.diff(values.astype(np.float64), prepend=0)[1:] > 0) | np.isinf(values[1:])).all()
    assert keys.min() > 0
    for quiet in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        nan = np.array([quiet], dtype=np.uint32).view(np.float32)[0]
        assert library.order_key(nan) == library.order_key(-np.inf)
    assert library.order_key(-0.0) == library.order_key(0.0)


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "random": torch.randn,
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: -torch.arange(n).float(),
    "equal": lambda n: torch.full((n,), 2.5),
    "zeros": lambda n: torch.randn(n).relu_(),
    "few values": lambda n: torch.randint(-1, 2, (n,)).float(),
    "last": lambda n: (torch.arange(n) >= n - n // 3).float(),
    "nan": lambda n: torch.where(torch.rand(n) < 0.7, torch.nan, torch.randn(n)),
    "infinite": lambda n: torch.where(torch.rand(n) < 0.3, -torch.inf, torch.where(torch.rand(n) < 0.1, torch.inf, 1)),
    "close": lambda n: 1 + torch.randint(0, 40, (n,)) * 2.0**-23,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("k", [1, 3, 8, 24])
def test_the_walk_selects_what_the_definition_does(library, kind, n, k):
    scores = KINDS[kind](n)
    for backwards in (False, True):
        chosen, _ = walk(library, scores, k, backwards=backwards)
        assert torch.equal(chosen, expected(scores, k))


@pytest.mark.parametrize(("k", "capacity"), [(512, 4096), (2048, 8192)])
@pytest.mark.parametrize("kind", KINDS)
def test_real_sizes(library, kind, k, capacity):
    scores = KINDS[kind](70_001)
    chosen, cuts = walk(library, scores, k, tile=8192, capacity=capacity)
    assert torch.equal(chosen, expected(scores, k))
    assert cuts <= (1 if kind == "random" and k == 512 else 8), "most of a random row does not reach the list"


def test_merging_slices_selects_the_same(library):
    for n, piece, k in ((1000, 64, 8), (513, 64, 8), (130, 128, 3), (64, 64, 64), (5, 64, 8)):
        scores = torch.randn(n).mul_(2).round_()
        positions, values = [], []
        for begin in range(0, n, piece):
            part = scores[begin : begin + piece]
            chosen, _ = walk(library, part, k)
            chosen = chosen[chosen >= 0].long()
            positions.append(chosen + begin)
            values.append(part[chosen])
        merged = torch.cat(values)
        assert library.merged_length(n, piece, k) == len(merged)
        final, _ = walk(library, merged, k)
        final = torch.where(final >= 0, torch.cat(positions)[final.clamp(min=0).long()].int(), -1)
        assert torch.equal(final, expected(scores, k))


def test_candidate_lengths_count_visible_positions(library):
    for block in (1, 4, 8):
        for visible in range(0, 40):
            blocks = [b for b in (0, 2, 3, 4, 9) if b * block < visible]
            count = sum(b * block + i < visible for b in blocks for i in range(block))
            assert library.candidate_length(len(blocks), blocks[-1] if blocks else 0, block, visible) == count


def test_positions_fit_the_sorting_bins(library):
    for length in (1, 2047, 2048, 2049, 4096, 4097, (1 << 20) - 1, 1 << 20):
        shift = library.position_shift(length)
        assert (length - 1) >> shift < 2048
        assert shift == 0 or (length - 1) >> (shift - 1) >= 2048
