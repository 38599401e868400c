"""Storing rows in the rings."""

import pytest
import torch

import swa_replay
from kernel_core import using

NAMES = ("new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos")


def store(case, floor, **changes):
    arguments = {**{k: case[k] for k in NAMES}, **changes}
    swa_replay.store_window(**arguments, floor=torch.tensor(floor, dtype=torch.int64))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("lengths", "starts", "floor"),
    [
        ([1], [0], [0]),
        ([5, 0, 1], [36, 3, 1000], [0, 0, 0]),
        ([100, 38, 39], [7, 0, 12], [0, 0, 0]),  # longer than, as long as, and one above the ring
        ([10, 10, 10], [30, 30, 30], [35, 40, 29]),
        ([90], [0], [60]),
    ],
)
def test_matches_reference_and_leaves_the_rest(window_case, packed, lengths, starts, floor):
    case = window_case(lengths, starts, packed=packed)
    before = case["ring"].clone()
    expected = before.clone()
    store(case, floor)
    with using("reference"):
        store(case, floor, ring=expected)
    assert torch.equal(case["ring"], expected)
    changed = (expected != before).any(-1)
    for b, (n, start) in enumerate(zip(lengths, starts, strict=True)):
        stored = range(max(start, start + n - 38, floor[b]), start + n)
        slot = int(case["ring_slot"][b])
        assert set(changed[slot].nonzero().flatten().tolist()) == {p % 38 for p in stored}
        for p in stored:
            assert torch.equal(expected[slot, p % 38], case["new_rows"][int(case["cu_seqlens"][b]) + p - start])
    untouched = sorted(set(range(len(before))) - set(case["ring_slot"].tolist()))
    assert torch.equal(expected[untouched], before[untouched])


def test_guard_bytes(window_case):
    case = window_case([90, 3], [0, 36])
    held = torch.full((len(case["ring"]) + 2, *case["ring"].shape[1:]), 0xA5, dtype=torch.uint8)
    store(case, [0, 0], ring=held[1:-1])
    assert (held[0] == 0xA5).all() and (held[-1] == 0xA5).all()


def test_floor_keeps_what_a_later_step_reads(window_case):
    """Rows below a decoder tail's start never reach the ring, and attention with that lower bound never misses them."""
    case = window_case([60], [0], lower=[25])
    store(case, [25])
    after = {**case, "lower": torch.tensor([25])}
    step = window_case([1], [60], seed=1)
    step.update(ring=case["ring"], ring_slot=case["ring_slot"], lower=after["lower"])
    result = swa_replay.window_attention(**step)
    whole = {
        **step,
        "q": torch.cat((case["q"], step["q"])),
        "new_rows": torch.cat((case["new_rows"], step["new_rows"])),
        "rope": torch.cat((case["rope"], step["rope"])),
        "cu_seqlens": torch.tensor([0, 61]).int(),
        "start_pos": torch.tensor([0]),
    }
    assert torch.equal(swa_replay.window_attention(**whole)[-1:], result)


def test_registered_op(window_case):
    case, expected = window_case([5, 4], [0, 40]), window_case([5, 4], [0, 40])
    store(expected, [0, 0])
    torch.ops.swa_replay.store_window(*(case[k] for k in NAMES), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(case["ring"], expected["ring"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ring_slot", lambda c: torch.full_like(c["ring_slot"], 2)),
        ("ring_slot", lambda c: c["ring_slot"] - 9),
        ("cu_seqlens", lambda c: torch.tensor([0, 6, 12]).int()),
        ("new_rows", lambda c: c["new_rows"][:, :-1].contiguous()),
        ("start_pos", lambda c: torch.tensor([-5, 0])),
        ("ring", lambda c: c["ring"].short()),
    ],
)
def test_bad_input_writes_nothing(window_case, name, change):
    case = window_case([5, 4], [0, 40])
    before = case["ring"].clone()
    with pytest.raises(ValueError, match=rf"^{name}.*got.*allowed"):
        store(case, [0, 0], **{name: change(case)})
    assert torch.equal(case["ring"], before)
