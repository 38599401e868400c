"""Window prefill on an NVIDIA GPU against its reference, and what a row may never depend on."""

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
WINDOW, RING = 128, 134


def build(lengths, starts, *, heads=64, lower=None, seed=0):
    g = torch.Generator().manual_seed(seed)
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
        "lower": torch.tensor(lower if lower is not None else [0] * batch, dtype=torch.int64),
        "sink": normal(heads),
        "rope": normal(rows, 64),
    }


def attend(case, run_rows=32, window=WINDOW, **changes):
    """The kernel, between guard rows that nothing may write to."""
    native = importlib.import_module("mla_fp4._cuda")
    t = {name: tensor.cuda() for name, tensor in {**case, **changes}.items()}
    rows, heads, _ = t["q"].shape
    guarded = torch.full((rows + 2, heads, 512), 77.0, dtype=torch.bfloat16, device="cuda")
    guarded[1:-1] = torch.nan
    names = ["q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower", "sink", "rope"]
    native.window_prefill(
        **{name: t[name].data_ptr() for name in names},
        out=guarded[1:-1].data_ptr(),
        rows=rows,
        heads=heads,
        batch=t["lower"].shape[0],
        slots=t["ring"].shape[0],
        ring_rows=t["ring"].shape[1],
        window=window,
        scale=512**-0.5,
        run_rows=run_rows,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    torch.cuda.synchronize()
    assert (guarded[0] == 77).all() and (guarded[-1] == 77).all()
    return guarded[1:-1].cpu()


def reference(case, window=WINDOW):
    batch, rows = case["lower"].shape[0], case["q"].shape[0]
    with using("reference"):
        return mla_fp4.sparse_attention(
            **{**case, "q": case["q"].float()},
            window=window,
            pages=torch.zeros(1, 64, 288, dtype=torch.uint8),
            rows_per_block=64,
            block_table=torch.zeros(batch, 1).int(),
            indices=torch.zeros(rows, 0).int(),
            scale=512**-0.5,
        )


def check(actual, case, window=WINDOW):
    # a weight is rounded to 2^-9 of itself, a result to 2^-9, and values are up to about 4
    assert_close(actual.float(), reference(case, window), atol=2e-2, rtol=2.01 / 128, max_diff=5e-6)


def alone(case, row, window=WINDOW):
    """One row of the batch as a batch of one token, its earlier keys moved to a ring of NaN."""
    b = int(torch.searchsorted(case["cu_seqlens"], row, right=True)) - 1
    first, start, size = int(case["cu_seqlens"][b]), int(case["start_pos"][b]), case["ring"].shape[1]
    position = start + row - first
    ring = torch.full_like(case["ring"], 255)[:1]
    for key in range(max(0, int(case["lower"][b]), position - window + 1), position):
        old = case["ring"][case["ring_slot"][b], key % size]
        ring[0, key % size] = old if key < start else case["new_rows"][first + key - start]
    return {
        **case,
        **{name: case[name][row : row + 1] for name in ("q", "new_rows", "rope")},
        "ring": ring,
        "ring_slot": torch.zeros(1).int(),
        "cu_seqlens": torch.tensor([0, 1]).int(),
        "start_pos": torch.tensor([position]),
        "lower": case["lower"][b : b + 1],
    }


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "starts", "lower"),
    [
        ([1], [0], None),
        ([1], [5000], None),
        ([2], [300], None),
        ([9], [140], None),
        ([127], [0], None),
        ([128], [0], None),
        ([129], [0], None),
        ([40], [100], None),
        ([300], [2**33 + 77], None),
        ([1, 1, 1], [0, 127, 4000], None),
        ([0, 150, 0, 33, 2, 0], [7, 30, 0, 131, 128, 5], None),
        ([20, 170, 3], [200, 100, 9], [190, 150, 40]),
    ],
)
def test_matches_reference(heads, lengths, starts, lower):
    case = build(lengths, starts, heads=heads, lower=lower)
    check(attend(case), case)


@pytest.mark.parametrize("window", [1, 17, 100])
def test_narrow_windows(window):
    case = build([50, 3], [90, 0])
    check(attend(case, window=window), case, window)


@pytest.mark.parametrize("heads", [64, 128])
def test_rows_depend_on_nothing_but_their_keys(heads):
    """Alone or in a batch, in runs of any length: the same bits."""
    case = build([170, 3, 1], [20, 64, 500], lower=[11, 0, 490], heads=heads)
    whole = attend(case)
    for run_rows in (1, 2, 3, 7, 17, 64, 1000):
        assert_bitwise(attend(case, run_rows), whole, name=f"runs of {run_rows}")
    for row in (0, 1, 13, 49, 127, 128, 150, 169, 170, 172, 173):
        assert_bitwise(attend(alone(case, row)), whole[row : row + 1], name=f"row {row}")


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_unused_rows_never_count(byte):
    """NaN in free slots and in ring rows outside of the windows."""
    case = build([3, 160], [100, 8], lower=[90, 0])
    ring = torch.full_like(case["ring"], byte)
    for b, (start, low) in enumerate([(100, 90), (8, 0)]):
        for key in range(max(low, start - WINDOW + 1), start):
            at = case["ring_slot"][b], key % RING
            ring[at] = case["ring"][at]
    assert_bitwise(attend(case, ring=ring), attend(case))


@pytest.mark.parametrize("run_rows", [1, 5, 64, 1000])
@pytest.mark.parametrize("bad", [[150], [0], [60, 61], [60, 188], [299], [10, 20, 30, 200]])
def test_nan_rows_reach_only_who_sees_them(bad, run_rows):
    """Rows before and after keep their bits: a key is in the ring only while every row at work sees it."""
    case = build([300], [40])
    rows = case["new_rows"].clone()
    rows[bad, -1] = 0xFF
    at = torch.arange(300)
    hit = torch.stack([(at >= b) & (at < b + WINDOW) for b in bad]).any(0)
    clean, actual = attend(case), attend(case, run_rows, new_rows=rows)
    assert actual[hit].isnan().any(-1).all()
    assert_bitwise(actual[~hit], clean[~hit])


def test_a_nan_in_the_ring_leaves_with_its_position():
    case = build([200], [1000])
    ring = case["ring"].clone()
    ring[case["ring_slot"][0], 950 % RING, 512] = 0xFF  # seen by rows up to position 1077
    clean, actual = attend(case, 200), attend(case, 200, ring=ring)
    assert actual[:78].isnan().any(-1).all()
    assert_bitwise(actual[78:], clean[78:])


def test_a_nan_query_stays_in_its_head():
    case = build([40], [10])
    q = case["q"].clone()
    q[7, 3, 100] = torch.nan
    clean, actual = attend(case), attend(case, q=q)
    assert actual[7, 3].isnan().all()
    actual[7, 3] = clean[7, 3]
    assert_bitwise(actual, clean)


def test_rows_without_keys():
    case = build([40], [50], lower=[60])
    actual = attend(case)
    assert (actual[:10] == 0).all()
    check(actual, case)


def test_extreme_sinks():
    case = build([5], [3])
    case["sink"][:5] = torch.tensor([-math.inf, math.inf, 300.0, -300.0, 0.0])
    actual = attend(case)
    check(actual, case)
    assert (actual[:, 1] == 0).all()


@pytest.mark.parametrize("run_rows", [1, 16, 100])
def test_repeats_agree(run_rows):
    """More CTAs than the device holds at once, again and again."""
    case = build([3000, 20, 700], [90, 0, 17], seed=3)
    first = attend(case, run_rows)
    for _ in range(20):
        assert_bitwise(attend(case, run_rows), first)


def test_close_to_sparse_attention():
    """The general kernel without selected keys, on a batch too large for the reference."""
    native = importlib.import_module("mla_fp4._cuda")
    case = build([2000, 1, 333], [0, 4096, 70], lower=[0, 4000, 0])
    t = {name: tensor.cuda() for name, tensor in case.items()}
    rows, heads, _ = case["q"].shape
    out = torch.empty_like(t["q"])
    names = ["q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower", "sink", "rope"]
    empty = torch.zeros(16, dtype=torch.int32, device="cuda")
    native.sparse_attention(
        **{name: t[name].data_ptr() for name in names},
        **dict.fromkeys(("pages", "block_table", "indices"), empty.data_ptr()),
        out=out.data_ptr(), rows=rows, heads=heads, batch=3, slots=t["ring"].shape[0], ring_rows=RING, window=WINDOW,
        blocks=1, rows_per_block=64, table_width=1, selected=0, scale=512**-0.5,
        stream=torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert_close(attend(case).float(), out.cpu().float(), atol=3e-2, rtol=2.01 / 128, max_diff=5e-6)


def test_refuses_what_it_cannot_do():
    case = build([2], [5])
    for changes in ({"window": 129}, {"run_rows": 0}, {"ring": case["ring"][:, :100].contiguous()}):
        with pytest.raises(ValueError, match="window_prefill"):
            attend(case, **changes)
    with pytest.raises(ValueError, match="window_prefill"):
        attend(case, q=case["q"][:, :32].contiguous(), sink=case["sink"][:32].contiguous())
