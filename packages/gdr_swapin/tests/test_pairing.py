"""Two pieces in one strided copy: the same bytes, in fewer commands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdr_swapin.pairing import MOST_PITCH, paired, pairing_order
from gdr_swapin.plan import Copies


def copies_of(rows):
    return Copies(*(np.array([row[i] for row in rows], dtype=np.uint64) for i in range(3)))


def moved(strided, alone):
    """(target, source, size) of every row."""
    rows = set(zip(*(getattr(alone, f).tolist() for f in ("targets", "sources", "sizes")), strict=True))
    for i in range(len(strided)):
        for row in range(int(strided.rows[i])):
            to = int(strided.targets[i] + row * strided.target_pitches[i])
            rows.add((to, int(strided.sources[i] + row * strided.source_pitches[i]), int(strided.widths[i])))
    return rows


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 2)), max_size=17))
@settings(max_examples=300, deadline=None)
def test_the_same_bytes(rows):
    rows = [(10_000 + 64 * to, 50_000 + 64 * source, 32 * size) for to, source, size in rows]
    pairs, alone = paired(copies_of(rows))
    assert 2 * len(pairs) + len(alone) == len(rows) and moved(pairs, alone) == set(rows)
    assert (pairs.target_pitches >= pairs.widths).all() and (pairs.source_pitches >= pairs.widths).all()


def test_distances_beyond_the_largest_pitch():
    for distance, pairs in ((MOST_PITCH - 15, 1), (MOST_PITCH + 1, 0)):
        found, alone = paired(copies_of([(64, 64, 16), (128, 64 + distance, 16)]))
        assert (len(found), len(alone)) == (pairs, 2 - 2 * pairs)


@given(st.permutations(range(15)), st.integers(0, 15))
@settings(max_examples=200, deadline=None)
def test_an_order_of_all_blocks(blocks, n):
    slots, blocks = np.arange(n), np.array(blocks[:n], dtype=np.int64)
    assert sorted(pairing_order(slots, blocks).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2, 101, 2356])
def test_most_scattered_blocks_find_a_partner(n):
    blocks = np.random.default_rng(n).permutation(n)
    order = pairing_order(np.arange(n), blocks)
    slots, pages = order[: n // 2 * 2].reshape(-1, 2), blocks[order[: n // 2 * 2]].reshape(-1, 2)
    both = (slots[:, 1] > slots[:, 0]) & (pages[:, 1] > pages[:, 0])
    assert n == 2 or both.mean() > (0.9 if n > 1000 else 0.6)
