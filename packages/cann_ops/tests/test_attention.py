"""Attention kernels in emulation against the reference: ragged batches, poisoned rows, infinite sinks, empty lists."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cann_ops
import kernel_core
from cann_ops.reference import attention as reference
from kernel_core import formats

D, RING = 512, 70
SCALE = 1 / math.sqrt(D)


def batch(heads, lengths, starts, *, window, selected, blocks=4, rows_per_block=16):
    """Arguments of `sparse_attention`; every byte that no key names is a NaN."""
    rows, requests = sum(lengths), len(lengths)
    q = torch.randn(rows, heads, D)
    new = formats.quantize_window(torch.randn(rows, D))
    ring = torch.full((requests + 1, RING, D + D // 32), 0xFF, dtype=torch.uint8)
    slots = torch.arange(1, requests + 1, dtype=torch.int32).flip(0)
    for slot, start in zip(slots.tolist(), starts, strict=True):
        for position in range(max(0, start - RING), start):
            ring[slot, position % RING] = formats.quantize_window(torch.randn(D))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    pages = torch.full((blocks, rows_per_block, 288), 0xFF, dtype=torch.uint8)
    table = torch.stack([torch.randperm(blocks)[:2] for _ in lengths]).int()
    indices = torch.randint(-1, 2 * rows_per_block, (rows, selected), dtype=torch.int32)
    lower = torch.zeros(requests, dtype=torch.int64)
    angles = torch.rand(rows, 32) * 6
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    places = reference.page_rows(cu, torch.tensor(starts), table, rows_per_block, indices)
    flat = pages.view(-1, 288)
    for place in places[places >= 0].unique().tolist():
        flat[place] = formats.quantize_main(torch.randn(D))
    return [
        q, new, ring, slots, cu, torch.tensor(starts), lower, window, pages, rows_per_block, table, indices,
        torch.randn(heads), rope, SCALE,
    ]  # fmt: skip


def assert_near(found, expected, rounded):
    """Within the rounding of q, of the weights and of the result to bfloat16, row by row."""
    assert not found.isnan().any()
    error = (found - expected).abs()
    allowed = rounded + expected.abs().amax(-1, keepdim=True) / 64
    assert (error <= allowed).all(), f"worst {float(error.max())}"


def test_window_and_selected_rows_share_one_softmax(emulated):
    arguments = batch(32, [1, 3, 2], [200, 0, 69], window=60, selected=20)
    arguments[6] = torch.tensor([150, 0, 60])  # a replay that begins later
    arguments[12][0], arguments[12][1] = torch.inf, -torch.inf
    arguments[11][1] = -1  # nothing selected
    found = cann_ops.sparse_attention(*arguments)
    expected = reference.sparse_attention(arguments[0].bfloat16().float(), *arguments[1:])
    assert_near(found, expected, 1e-3)
    assert (found[:, 0] == 0).all(), "an infinite sink takes everything"


def test_a_row_without_keys_gives_zeros(emulated):
    arguments = batch(32, [2], [100], window=60, selected=4)
    arguments[6] = torch.tensor([1000])
    arguments[11][:] = -1
    for sink in (0.0, -torch.inf):
        arguments[12][:] = sink
        assert (cann_ops.sparse_attention(*arguments) == 0).all()


def test_a_row_does_not_depend_on_its_batch(emulated):
    """Alone, in front of 32 others, and behind a request of another length: the same bits."""
    arguments = batch(32, [33, 1], [60, 130], window=60, selected=20)
    whole = cann_ops.sparse_attention(*arguments)
    alone = list(arguments)
    for i in (0, 1, 11, 13):
        alone[i] = arguments[i][33:].contiguous()
    for i in (3, 5, 6, 10):
        alone[i] = arguments[i][1:].contiguous()
    alone[4] = torch.tensor([0, 1], dtype=torch.int32)
    assert torch.equal(cann_ops.sparse_attention(*alone), whole[33:])


@pytest.mark.slow
def test_production_shapes(emulated):
    """64 heads, a window of 128 over a ring of 134, with and without 512 selected rows, a few of them missing."""
    arguments = batch(64, [2], [300], window=60, selected=512, blocks=8, rows_per_block=64)
    arguments[2] = torch.full((2, 134, 528), 0xFF, dtype=torch.uint8)
    arguments[2][1] = formats.quantize_window(torch.randn(134, D))
    arguments[7] = 128
    rounded = arguments[0].bfloat16().float()
    found = cann_ops.sparse_attention(*arguments)
    assert_near(found, reference.sparse_attention(rounded, *arguments[1:]), 1e-3)
    window = [*arguments[:8], *arguments[12:]]
    found = cann_ops.window_attention(*window)
    assert_near(found, reference.window_attention(rounded, *window[1:]), 1e-3)


def test_no_rows_launch_nothing(emulated):
    arguments = batch(32, [1], [5], window=60, selected=4)
    for i in (0, 1, 11, 13):
        arguments[i] = arguments[i][:0].contiguous()
    arguments[4] = torch.zeros(2, dtype=torch.int32)
    assert cann_ops.sparse_attention(*arguments).shape == (0, 32, D)


def test_near_rows_are_where_the_window_is():
    """Places against a search by hand: ring rows by position, then new rows, oldest first."""
    cu, starts, lower = torch.tensor([0, 3, 4]).int(), torch.tensor([2, 75]), torch.tensor([1, 0])
    slots = torch.tensor([1, 0]).int()
    found = reference.near_rows(cu, starts, lower, 4, slots, (2, 6), 4)
    new = 2 * 6
    assert found[0].tolist() == [6 + 1, new + 0, -1, -1]  # positions 1, 2; 0 lies below the bound
    assert found[2].tolist() == [6 + 1, new + 0, new + 1, new + 2]
    assert found[3].tolist() == [72 % 6, 73 % 6, 74 % 6, new + 3]


REQUEST = st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 45))  # rows, start, lower bound


@given(requests=st.lists(REQUEST, min_size=1, max_size=4), window=st.integers(1, 9), more=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_near_rows_of_any_batch(requests, window, more):
    """Row by row against the rule: positions from max(0, lower, p - window + 1) to p, by where each of them lies."""
    ring_size, slots = window + more, len(requests) + 1
    lengths, starts, lower = zip(*requests, strict=True)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    slot = torch.arange(len(requests), dtype=torch.int32).flip(0)
    total = int(cu[-1])
    found = reference.near_rows(
        cu, torch.tensor(starts), torch.tensor(lower), window, slot, (slots, ring_size), total
    ).tolist()
    rows = [(b, i) for b, length in enumerate(lengths) for i in range(length)]
    for t, (b, i) in enumerate(rows):
        position = starts[b] + i
        wanted = []
        for key in range(max(0, lower[b], position - window + 1), position + 1):
            old = key < starts[b]
            at = int(slot[b]) * ring_size + key % ring_size if old else slots * ring_size + int(cu[b]) + key - starts[b]
            wanted.append(at)
        assert found[t] == wanted + [-1] * (window - len(wanted))


@pytest.mark.parametrize("row", [528, 7])
def test_a_window_is_gathered_byte_by_byte(emulated, row):
    arguments = batch(32, [1, 3], [200, 0], window=60, selected=1)
    new = torch.randint(0, 256, (4, row), dtype=torch.uint8)
    ring = torch.randint(0, 256, (3, RING, row), dtype=torch.uint8)
    given = (new, ring, *arguments[3:6], torch.tensor([150, 0]), 60)
    found = cann_ops.gather_window(*given)
    with kernel_core.using("reference"):
        expected = cann_ops.gather_window(*given)
    assert torch.equal(found, expected)
    assert torch.equal(found[3, :3], new[1:4]) and (found[3, 3:] == 0).all()


def test_shapes_without_a_kernel_are_named():
    arguments = batch(32, [1], [5], window=60, selected=4)
    with pytest.raises(NotImplementedError, match="block=True"):
        cann_ops.window_attention(*arguments[:8], *arguments[12:], block=True)
    arguments[1], arguments[2] = torch.zeros(1, D), torch.zeros(2, RING, D)
    with pytest.raises(NotImplementedError, match=r"float32 rows .* uint8 rows of 512 channels"):
        cann_ops.sparse_attention(*arguments)
