"""Sparse attention on an NVIDIA GPU against its reference, and what a row may never depend on."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HEADS = [1, 4, 8, 19, 32, 40, 64, 128]  # a CTA's heads need not fill a product
WINDOW, ROWS_PER_BLOCK, GARBAGE = 128, 64, 2**31 - 1


def build(lengths, starts, *, heads=64, selected=512, lower=None, visible=None, holes=0.2, seed=0):
    """A ragged batch on the CPU whose tables hold garbage beyond each request and whose index lists have holes."""
    g = torch.Generator().manual_seed(seed)
    rows, batch = sum(lengths), len(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    visible = [max(1, 3 * selected - 7 * b) for b in range(batch)] if visible is None else visible
    used = [-(-v // ROWS_PER_BLOCK) for v in visible]
    blocks = sum(used) + 2
    table = torch.full((batch, max(used) + 2), GARBAGE, dtype=torch.int32)
    ids = torch.randperm(blocks - 1, generator=g) + 1
    for b, n in enumerate(used):
        table[b, :n] = ids[sum(used[:b]) : sum(used[:b]) + n].int()
    indices, row = torch.full((rows, selected), -1, dtype=torch.int32), 0
    for b, n in enumerate(lengths):
        for _ in range(n):
            k = min(selected, visible[b])
            indices[row, :k] = torch.randperm(visible[b], generator=g)[:k].sort().values.int()
            row += 1
    indices[torch.rand(rows, selected, generator=g) < holes] = -1
    return {
        "q": normal(rows, heads, 512).bfloat16(),
        "new_rows": formats.quantize_window(normal(rows, 512)),
        "ring": formats.quantize_window(normal(batch + 2, WINDOW + 6, 512)),
        "ring_slot": (torch.randperm(batch + 1, generator=g)[:batch] + 1).int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "start_pos": torch.tensor(starts, dtype=torch.int64),
        "lower": torch.tensor(lower if lower is not None else [0] * batch, dtype=torch.int64),
        "pages": formats.quantize_main(normal(blocks, ROWS_PER_BLOCK, 512)),
        "block_table": table,
        "indices": indices,
        "sink": normal(heads),
        "rope": normal(rows, 64),
    }


def groups(heads):
    """How many heads a CTA may take; 0 lets the library choose."""
    return [0, 8, 16, 32, *([64] if heads % 64 == 0 else [])]


def attend(case, group=0, *, multiprocessors=132, **changes):
    """The kernel, in bfloat16, between guard rows that nothing may write to."""
    native = importlib.import_module("mla_fp4._cuda")
    t = {name: tensor.cuda() for name, tensor in {**case, **changes}.items()}
    rows, heads, _ = t["q"].shape
    guarded = torch.full((rows + 2, heads, 512), 77.0, dtype=torch.bfloat16, device="cuda")
    guarded[1:-1] = torch.nan
    selected = t["indices"].shape[1]
    names = ["q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower"]
    names += ["pages", "block_table", "indices", "sink", "rope"]
    native.sparse_attention(
        *(t[name].data_ptr() for name in names),
        guarded[1:-1].data_ptr(),
        rows,
        heads,
        t["lower"].shape[0],
        t["ring"].shape[0],
        t["ring"].shape[1],
        WINDOW,
        t["pages"].shape[0],
        t["pages"].shape[1],
        t["block_table"].shape[1],
        selected,
        512**-0.5,
        group,
        multiprocessors,
        torch.cuda.current_stream().cuda_stream,
    )
    torch.cuda.synchronize()
    assert (guarded[0] == 77).all() and (guarded[-1] == 77).all()
    return guarded[1:-1].cpu()


def reference(case):
    with using("reference"):
        return mla_fp4.sparse_attention(
            **{**case, "q": case["q"].float()}, window=WINDOW, rows_per_block=ROWS_PER_BLOCK, scale=512**-0.5
        )


def check(actual, case):
    # Weights are rounded to bfloat16 before they meet values of up to 5, so single elements near zero move by 2^-9 of
    # the sum of |weight value|; the rows as a whole stay at the usual bound.
    assert_close(actual.float(), reference(case), atol=6e-3, rtol=2.01 / 128, max_diff=5e-6)


def alone(case, row):
    """One row of the batch as a batch of one token, its earlier window keys moved to a ring of NaN."""
    b = int(torch.searchsorted(case["cu_seqlens"], row, right=True)) - 1
    first, start, size = int(case["cu_seqlens"][b]), int(case["start_pos"][b]), case["ring"].shape[1]
    position = start + row - first
    ring = torch.full_like(case["ring"], 255)[:1]
    for key in range(max(0, int(case["lower"][b]), position - WINDOW + 1), position):
        old = case["ring"][case["ring_slot"][b], key % size]
        ring[0, key % size] = old if key < start else case["new_rows"][first + key - start]
    return {
        **case,
        **{name: case[name][row : row + 1] for name in ("q", "new_rows", "indices", "rope")},
        "ring": ring,
        "ring_slot": torch.zeros(1).int(),
        "cu_seqlens": torch.tensor([0, 1]).int(),
        "start_pos": torch.tensor([position]),
        "lower": case["lower"][b : b + 1],
        "block_table": case["block_table"][b : b + 1],
    }


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("lengths", "starts", "selected"),
    [
        ([1], [0], 512),
        ([1, 1, 1], [0, 127, 4000], 512),
        ([0, 150, 0, 3], [7, 30, 0, 131], 200),
        ([5], [200], 0),
        ([2, 1], [63, 1], 1),
        ([1], [300], 65),
    ],
)
def test_matches_reference(heads, lengths, starts, selected):
    case = build(lengths, starts, heads=heads, selected=selected)
    expected = attend(case)
    check(expected, case)
    for group in groups(heads)[1:]:
        assert_bitwise(attend(case, group), expected, name=f"{group} heads a CTA")


@pytest.mark.parametrize("heads", HEADS)
def test_rows_depend_on_nothing_but_their_keys(heads):
    """Alone or in a batch, on one multiprocessor or many, any heads a CTA: the same bits."""
    case = build([50, 3, 1], [20, 64, 500], lower=[11, 0, 490], heads=heads)
    whole = attend(case)
    for group in groups(heads):
        for multiprocessors in (1, 7, 132):
            actual = attend(case, group, multiprocessors=multiprocessors)
            assert_bitwise(actual, whole, name=f"{group} heads a CTA, {multiprocessors} CTAs")
    for row in (0, 1, 13, 49, 50, 52, 53):
        for group in groups(heads):
            assert_bitwise(attend(alone(case, row), group), whole[row : row + 1], name=f"row {row}")


@pytest.mark.parametrize(("heads", "group"), [(16, 0), (64, 8), (64, 64)])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_unused_rows_never_count(heads, group, byte):
    """NaN in block 0, in every row that no index names, in free slots and in ring rows outside of the windows."""
    case = build([3, 20], [100, 8], lower=[90, 0], heads=heads)
    pages, ring = torch.full_like(case["pages"], byte), torch.full_like(case["ring"], byte)
    for b, (start, low) in enumerate([(100, 90), (8, 0)]):
        for j in case["indices"][case["cu_seqlens"][b] : case["cu_seqlens"][b + 1]].unique().tolist():
            if j >= 0:
                at = case["block_table"][b, j // ROWS_PER_BLOCK], j % ROWS_PER_BLOCK
                pages[at] = case["pages"][at]
        for key in range(max(low, start - WINDOW + 1), start):
            at = case["ring_slot"][b], key % ring.shape[1]
            ring[at] = case["ring"][at]
    assert_bitwise(attend(case, group, pages=pages, ring=ring), attend(case, group))


@pytest.mark.parametrize(("heads", "group"), [(16, 0), (64, 8), (64, 64)])
def test_lists_of_holes_and_rows_without_keys(heads, group):
    case = build([4], [50], heads=heads)
    holes = torch.full_like(case["indices"], -1)
    window_only = attend(case, group, indices=holes)
    check(window_only, {**case, "indices": holes})
    assert_bitwise(attend(case, group, indices=holes[:, :0].contiguous()), window_only)
    run = case["indices"].clone()
    run[:, 100:400] = -1  # a whole chunk and the ends of its neighbours
    check(attend(case, group, indices=run), {**case, "indices": run})
    assert (attend(case, group, indices=holes, lower=torch.tensor([1000])) == 0).all()


@pytest.mark.parametrize(("heads", "group"), [(16, 0), (64, 8), (64, 64)])
def test_extreme_sinks(heads, group):
    case = build([5], [3], heads=heads)
    case["sink"][:5] = torch.tensor([-math.inf, math.inf, 300.0, -300.0, 0.0])
    actual = attend(case, group)
    check(actual, case)
    assert (actual[:, 1] == 0).all()


def test_a_nan_row_reaches_only_who_selects_it():
    case = build([20], [40], holes=0.0)
    target = int(case["indices"][3, 5])
    pages = case["pages"].clone()
    pages[int(case["block_table"][0, target // ROWS_PER_BLOCK]), target % ROWS_PER_BLOCK, -1] = 0x7F
    hit = (case["indices"] == target).any(1)
    clean, actual = attend(case), attend(case, pages=pages)
    assert actual[hit].isnan().any(-1).all() and 0 < hit.sum() < 20
    assert_bitwise(actual[~hit], clean[~hit])
    assert_bitwise(attend(case, 8, pages=pages)[~hit], clean[~hit])


@pytest.mark.parametrize(("heads", "group"), [(16, 0), (64, 8), (64, 64)])
def test_repeats_agree(heads, group):
    """More CTAs than the device holds at once, again and again."""
    case = build([300, 20], [90, 0], heads=heads)
    first = attend(case, group)
    check(first, case)
    for _ in range(20):
        assert_bitwise(attend(case, group), first)


def test_refuses_what_it_cannot_do():
    case = build([2], [5])
    with pytest.raises(ValueError, match="sparse_attention"):
        attend(case, 64, q=case["q"][:, :40].contiguous(), sink=case["sink"][:40].contiguous())
    with pytest.raises(ValueError, match="sparse_attention"):
        attend(case, 24)
    with pytest.raises(ValueError, match="sparse_attention"):
        attend(case, ring=case["ring"][:, :100].contiguous())  # fewer ring rows than the window
