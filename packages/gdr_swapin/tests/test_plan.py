"""Addresses and merging, against copies made one byte range at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdr_swapin import BlockLayout, Options
from gdr_swapin.plan import Copies, Source, by_slot, checked_ids, layer_copies, merged, regular_runs, spans_of
from gdr_swapin.threads import split


def ranges(copies):
    """Every (target, source) byte pair."""
    pairs = set()
    for to, source, size in zip(copies.targets.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True):
        pairs |= {(to + i, source + i) for i in range(size)}
    return pairs


def copies_of(rows):
    return Copies(*(np.array([row[i] for row in rows], dtype=np.uint64) for i in range(3)))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=14, unique_by=lambda p: p[0]))
@settings(max_examples=200, deadline=None)
def test_merging_moves_the_same_bytes(pairs):
    copies = copies_of([(100 + 8 * to, 1000 + 8 * source, 8) for to, source in pairs])
    joined = merged(copies)
    assert ranges(joined) == ranges(copies) and joined.bytes == copies.bytes and len(joined) <= len(copies)
    ends = list(zip(joined.targets + joined.sizes, joined.sources + joined.sizes, strict=True))[:-1]
    starts = list(zip(joined.targets, joined.sources, strict=True))[1:]
    assert not any(end == start for end, start in zip(ends, starts, strict=True))  # nothing is left to merge


def test_neighbours_in_a_layer(small, pools_of):
    pools = pools_of(small, 10)
    source = Source(1 << 20, small.block_bytes)
    alone = layer_copies(source, np.array([1, 3, 5]), pools, np.array([9, 7, 5]), 2)
    assert len(alone) == 6 and alone.bytes == 3 * small.layers[2].slice_bytes
    assert alone.sources[0] == (1 << 20) + small.block_bytes + small.offsets[2]
    assert alone.targets[3] == pools.main[2][9].data_ptr()
    assert alone.sources[3] - alone.sources[0] == small.layers[2].index_bytes


def test_ids_in_the_order_of_slots():
    g = np.random.default_rng(0)
    for n, slot_end in itertools.product((0, 1, 2, 300), (1, 2, 100, 2048, 2049, 1 << 22, (1 << 22) + 1, 1 << 40)):
        slots, blocks = g.integers(0, slot_end, n), g.permutation(1023)[:n] + 1
        order = np.argsort(slots, kind="stable")
        strided = np.repeat(slots, 2)[::2], np.repeat(blocks, 2)[::2]
        mixed = slots.tolist(), torch.from_numpy(blocks)
        for ids_as in ((slots, blocks), (slots[order], blocks[order]), mixed, strided):
            found = by_slot(*ids_as, slot_end, 1024)
            assert all(ids.dtype == np.int64 and ids.flags.c_contiguous for ids in found)
            assert [ids.tolist() for ids in found] == [slots[order].tolist(), blocks[order].tolist()]


@pytest.mark.parametrize(
    ("slots", "blocks", "words"),
    [
        ([0, 10], [1, 2], r"slots: got \[10\], allowed is 0 to 9"),
        ([0, -1], [1, 2], r"slots: got \[-1\]"),
        ([0, 1], [1, 64], r"blocks: got \[64\], allowed is 1 to 63"),
        ([0, 1], [0, 1], r"blocks: got \[0\]"),
        ([0, 1, 2], [63, 1, 63], r"blocks: got \[63\] more than once"),
        ([0, 1, 2], [1, 2], "slots: got 3 ids, allowed is 2"),
    ],
)
def test_bad_ids_of_a_request(slots, blocks, words):
    for kind in (list, np.array):
        with pytest.raises(ValueError, match=words):
            by_slot(kind(slots), kind(blocks), 10, 64)


def test_slots_that_are_written_come_once():
    with pytest.raises(ValueError, match=r"slots: got \[4\] more than once"):
        by_slot(np.array([4, 2, 4]), np.array([1, 2, 3]), 10, 64, unique=True)
    assert by_slot(np.array([4, 2, 4]), np.array([1, 2, 3]), 10, 64)[0].tolist() == [2, 4, 4]


def test_spans_cover_a_block_once(layout):
    sizes = [source.slice_bytes for source in layout.layers]
    for order, groups in (("layer", [[s] for s in sizes]), ("first", [sizes[:1], sizes[1:]]), ("block", [sizes])):
        spans = spans_of(layout, order)
        assert [span.size for span in spans] == [sum(group) for group in groups]
        assert [span.end for span in spans][:-1] == [span.first for span in spans][1:]
        assert [span.offset for span in spans] == [layout.offsets[span.first] for span in spans]
    assert len(spans_of(BlockLayout(layout.layers[:1]), "first")) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_regular_runs(pairs, fewest):
    slots, blocks = (np.array([p[i] for p in pairs], dtype=np.int64) for i in range(2))
    runs, alone = regular_runs(slots, blocks, fewest)
    covered = np.zeros(len(pairs), dtype=bool)
    for start, length in runs:
        assert length >= fewest and not covered[start : start + length].any()
        covered[start : start + length] = True
        assert (np.diff(slots[start : start + length]) == 1).all()
        assert (np.diff(blocks[start : start + length]) == 1).all()
    assert (covered == ~alone).all()


@given(st.lists(st.integers(1, 90), max_size=20), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_shares_cover_all_pieces(sizes, parts):
    copies = copies_of([(1000 * i, 7000 * i, size) for i, size in enumerate(sizes)])
    shares = split(copies, parts)
    assert len(shares) == parts and np.concatenate([s.targets for s in shares]).tolist() == copies.targets.tolist()
    if sizes:
        assert max(share.bytes for share in shares) <= copies.bytes / parts + max(sizes)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3, 10], r"x: got \[10\], allowed is 1 to 9"),
        ([0], r"x: got \[0\]"),
        ([-2, 1], r"x: got \[-2\]"),
        ([4, 2, 4], r"x: got \[4\] more than once"),
        ([1.5], "x: got float64"),
        (np.zeros((2, 2), dtype=np.int64), r"x: got int64 of shape \[2, 2\]"),
        ([True, False], "x: got bool"),
        ([2**70], "x: got object"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "x: got a tensor on meta"),
    ],
)
def test_bad_ids(ids, words):
    with pytest.raises(ValueError, match=words):
        checked_ids("x", ids, 1, 10, unique=True)


def test_good_ids():
    for ids in ([1, 9], (1, 9), np.array([1, 9], dtype=np.uint16), torch.tensor([1, 9], dtype=torch.int32)):
        found = checked_ids("x", ids, 1, 10)
        assert found.dtype == np.int64 and found.tolist() == [1, 9]
    assert checked_ids("x", [], 1, 10).shape == (0,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0},
        {"streams": 9},
        {"most_in_flight": 0},
        {"pieces_a_call": 0},
        {"pieces_a_call": 257},
        {"first_blocks": 0},
        {"order": "row"},
        {"loads": 3},
        {"scatter_loads": 2},
        {"piece_bytes": 24},
        {"stages": 3},
        {"stages": 32, "piece_bytes": 22784},
        {"staging_parts": 1},
        {"gather_share": 1.5},
    ],
)
def test_bad_options(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got .*allowed"):
        Options(**wrong)
