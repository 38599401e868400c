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
    lib.key_score.argtypes, lib.key_score.restype = [ctypes.c_uint32], ctypes.c_float
    lib.sample_index.argtypes, lib.sample_index.restype = [ctypes.c_uint32] * 3, ctypes.c_uint32
    lib.sample_rank.argtypes = [*[ctypes.c_int64] * 4, ctypes.c_void_p]
    lib.narrow.argtypes = [ctypes.c_uint32] * 3
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


def test_a_key_gives_its_score_back(library):
    for value in (1.5, -1.5, 0.0, 3e38, -3e38, 1e-45, -1e-45, np.inf):
        assert library.key_score(library.order_key(value)) == np.float32(value)


def test_samples_are_spread_over_the_row(library):
    for count, length in ((2048, 4097), (2048, 65_536), (8192, 1 << 20), (8192, 1_000_003)):
        places = [library.sample_index(i, count, length) for i in range(count)]
        stride = length // count
        assert all(i * stride <= place < (i + 1) * stride for i, place in enumerate(places)) and places[-1] < length
        assert stride < 8 or len({place % stride for place in places}) > stride // 2


@pytest.mark.parametrize(
    ("k", "count", "length", "capacity"),
    [(512, 2048, 4097, 4096), (512, 2048, 65_536, 8192), (512, 8192, 1 << 20, 8192), (2048, 8192, 1 << 20, 8192)],
)
def test_the_rank_of_a_sample_bounds_the_row(library, k, count, length, capacity):
    """Over 200 random rows: at least k entries reach it, and they fit."""
    rank = (ctypes.c_int * 2)()
    library.sample_rank(k, count, length, capacity, rank)
    assert 0 < rank[0] <= rank[1] < count
    # Of a row of ranks 0 ... length - 1: the sample's rank[i] best.
    generator, failed = np.random.default_rng(0), 0
    for _ in range(200):
        chosen = np.sort(generator.choice(length, count, replace=False))
        failed += not k <= chosen[rank[0] - 1] + 1 <= capacity or chosen[rank[1] - 1] > capacity * 1.2
    assert failed <= 4


def test_steps_narrow_to_a_key(library):
    for low, high in ((0, 2**32 - 1), (5, 5), (0x3F800000, 0x3F800FFF), (0x7FFFFF, 0xC0490FDB), (1, 2049), (1, 2048)):
        for wanted in (low, high, low + (high - low) // 3, low + (high - low) // 2):
            assert 1 <= library.narrow(low, high, wanted) <= 3


def test_parts_of_scores_fit_the_workspace(tmp_path):
    lib = host_library(HERE / "host" / "index_topk_plan.cpp", tmp_path, HERE.parent / "csrc/cuda/sm90")
    lib.parts.argtypes = [*[ctypes.c_int64] * 4, ctypes.c_void_p]
    out = (ctypes.c_int64 * 3)()
    for rows, width, k in ((1, 1, 1), (64, 65_536, 512), (8192, 65_536, 512), (16, 1 << 20, 2048), (300, 30_001, 4)):
        for floats in (1 << 26, 1 << 24, 1 << 21, 1 << 18, 7000, 100):
            lib.parts(rows, width, k, floats, out)
            group, positions, stride = out
            if group == 0:
                assert floats < k + 4096 + 256 and floats < width
                continue
            assert group <= rows and group * stride <= floats and stride % 4 == 0
            if positions == width:
                assert stride >= width
            else:
                assert positions % 256 == 0 and positions >= max(4096, k) and stride >= k + positions
