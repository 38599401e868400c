"""Row writers in emulation against the reference: bytes equal."""

from __future__ import annotations

import pytest
import torch

import cann_ops
from cann_ops import reference
from cann_ops.reference import rows as rows_reference
from kernel_core import formats
from kernel_core.testing import assert_bitwise

FORMATS = [("main", 512), ("window", 512), ("index", 128)]


def hard_rows(rows, d):
    """Rows of very different size, and the corners: zeros, NaN, infinities, subnormals, ties, the largest number."""
    x = torch.randn(rows, d) * torch.exp2(torch.randint(-20, 20, (rows, 1)).float())
    corners = (
        torch.zeros(d),
        torch.randn(d).where(torch.arange(d) != 5, torch.nan),
        torch.randn(d).where(torch.arange(d) != 7, torch.inf),
        torch.randn(d).where(torch.arange(d) != d - 1, -torch.inf),
        torch.full((d,), 1e-40),
        torch.arange(d).float() / 8 - 6,
        torch.full((d,), -3e38),
        -torch.zeros(d),
    )
    for i, corner in enumerate(corners[:rows]):
        x[i] = corner
    return x


@pytest.mark.parametrize("format, d", FORMATS)
@pytest.mark.parametrize("rows", [1, 33])
def test_quantised_rows_are_the_formats_bytes(emulated, format, d, rows):
    x = hard_rows(rows, d)
    assert_bitwise(
        cann_ops.kv_rows(x, None, 1.0, None, format=format), rows_reference.kv_rows(x, None, 1.0, None, format=format)
    )


@pytest.mark.parametrize("format, d", FORMATS)
def test_any_bits_of_float32(emulated, format, d):
    """Every kind of number next to any other: rows as drawn, and rows of one exponent, so that codes differ."""
    bits = torch.randint(-(2**31), 2**31, (66, d)).int()
    bits[33:] = (bits[33:] & ~0x7F000000) | 0x3F000000
    x = bits.view(torch.float32)
    found = cann_ops.kv_rows(x, None, 1.0, None, format=format)
    assert_bitwise(found, rows_reference.kv_rows(x, None, 1.0, None, format=format))
    assert len(found[33:].unique()) >= 16


@pytest.mark.parametrize("format, d", FORMATS)
def test_norm_rotation_and_rounding_come_first(emulated, format, d):
    x = torch.randn(37, d) * torch.exp2(torch.randint(-9, 9, (37, 1)).float())
    x[3] = 0
    weight, angles = torch.rand(d) + 0.5, torch.rand(37, 32) * 6
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    found = cann_ops.kv_rows(x, weight, 1e-6, rope, format=format, round_bf16=True)
    expected = rows_reference.kv_rows(x, weight, 1e-6, rope, format=format, round_bf16=True)
    # The sum of squares has another order, so a value may round to the neighbouring bfloat16, and a code with it.
    assert (found != expected).float().mean() < 1e-3
    assert_bitwise(found[3], expected[3])


def test_a_row_depends_on_itself_alone(emulated):
    x = hard_rows(70, 128)
    whole = cann_ops.kv_rows(x, torch.ones(128), 1e-6, None, format="index")
    alone = cann_ops.kv_rows(x[40:41].contiguous(), torch.ones(128), 1e-6, None, format="index")
    assert_bitwise(whole[40:41], alone)


@pytest.mark.parametrize("rows, d, norm", [(1, 1024, False), (9, 5120, True)])
def test_wide_rows_are_window_rows(emulated, rows, d, norm):
    x = torch.randn(rows, d) * 3
    x[0, 5] = 1e4
    weight = torch.rand(d) + 0.5 if norm else None
    codes, scales = cann_ops.norm_quantize(x, weight)
    wanted, wanted_scales = rows_reference.norm_quantize(x, weight, 1e-6)
    assert (codes.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() <= (1e-3 if norm else 0)
    assert_bitwise(scales, wanted_scales)


def test_empty_rows_make_empty_results(emulated):
    assert cann_ops.kv_rows(torch.empty(0, 512), None, 1.0, None).shape == (0, 288)
    assert [t.shape for t in cann_ops.norm_quantize(torch.empty(0, 1024), None)] == [(0, 1024), (0, 32)]


def test_rows_go_to_their_slots_and_nowhere_else(emulated):
    rows = torch.randint(0, 256, (75, 288), dtype=torch.uint8)
    slots = torch.randperm(5 * 64)[:75]
    slots[[5, 9]] = -1
    pages = torch.full((5, 64, 288), 0xAA, dtype=torch.uint8)
    expected = pages.clone()
    cann_ops.store_main(rows, pages, slots)
    reference.rows.store_main(rows, expected, slots)
    assert_bitwise(pages, expected)


@pytest.mark.parametrize("wrong", [5 * 64, -7, 2**40])
def test_a_slot_out_of_range_is_skipped(emulated, wrong):
    pages = torch.full((5, 64, 288), 0xAA, dtype=torch.uint8)
    before = pages.clone()
    cann_ops.store_main(torch.zeros(1, 288, dtype=torch.uint8), pages, torch.tensor([wrong]))
    assert_bitwise(pages, before)


@pytest.mark.parametrize("rows_per_block", [64, 128])
def test_index_pages_have_codes_first(emulated, rows_per_block):
    rows = formats.quantize_index(torch.randn(41, 128))
    slots = torch.randperm(3 * rows_per_block)[:41]
    slots[7] = -1
    pages = torch.full((3, rows_per_block * 68), 0xAA, dtype=torch.uint8)
    expected = pages.clone()
    cann_ops.store_index(rows, pages, slots, rows_per_block)
    rows_reference.store_index(rows, expected, slots, rows_per_block)
    assert_bitwise(pages, expected)


def test_rings_keep_the_newest_rows_from_the_floor_on(emulated):
    lengths, starts = [3, 0, 150, 1], [133, 7, 0, 10**9]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    new = torch.randint(0, 256, (int(cu[-1]), 528), dtype=torch.uint8)
    ring = torch.full((5, 134, 528), 0xAA, dtype=torch.uint8)
    expected = ring.clone()
    arguments = (
        torch.tensor([2, 2, 0, 4], dtype=torch.int32), cu, torch.tensor(starts), torch.tensor([134, 0, 20, 0])
    )  # fmt: skip
    cann_ops.store_window(new, ring, *arguments)
    rows_reference.store_window(new, expected, *arguments)
    assert_bitwise(ring, expected)
    assert (ring[1] == 0xAA).all() and (ring[0] != 0xAA).any()
