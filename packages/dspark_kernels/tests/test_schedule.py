"""Prefix selection against a stable sort written out, the layout it gives, and what bad numbers do to it."""

from __future__ import annotations

import random

import pytest
import torch

import dspark_kernels
import kernel_core
from dspark_kernels import new_schedule, schedule, survival
from kernel_core.testing import assert_bitwise

NAN = float("nan")
BACKENDS = pytest.mark.parametrize("backend", ["native", "reference"])


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def expected_lengths(confidence, limits, slots, fixed, budget, capacity):
    """Every draft by (survival descending, place, request); the first ones that the budget and the rows allow."""
    G = confidence.shape[1]
    lengths, drafts, rows = [0] * len(limits), [], 0
    for r, limit in enumerate(limits):
        if limit < 0 or slots[r] < 0:
            continue
        own = min(limit, G)
        if fixed[r] >= 0:
            lengths[r] = min(fixed[r], own)
        rows += 1 + lengths[r]
        alive = torch.tensor(1.0)
        for j in range(own if fixed[r] < 0 else 0):
            c = confidence[slots[r], j]
            alive = alive * (c.clamp(max=1.0) if c > 0 else torch.tensor(0.0))
            drafts.append((-alive.item(), j, r))
    for _, _, r in sorted(drafts)[: max(0, min(budget, capacity - rows))]:
        lengths[r] += 1
    return lengths


def make(R, S, G, seed, levels):
    """Random tables; few `levels` of confidence make nearly all drafts ties."""
    g = torch.Generator().manual_seed(seed)
    confidence = torch.rand(S, G, generator=g)
    if levels:
        confidence = (confidence * levels).round() / levels
        bad = torch.rand(S, G, generator=g)
        confidence[bad < 0.05] = NAN
        confidence[(bad > 0.05) & (bad < 0.1)] = -0.5
        confidence[(bad > 0.1) & (bad < 0.15)] = 1.5
        confidence[(bad > 0.15) & (bad < 0.17)] = torch.inf
    tokens = torch.randint(0, 129_280, (S, 1 + G), generator=g)
    starts = torch.randint(0, 2**20, (S,), generator=g)
    rng = random.Random(seed)
    limits = [rng.choice([-1, 0, 1, G - 1, G, G, G, G + 3]) for _ in range(R)]
    slots = rng.sample(range(S), R)
    slots = [s if rng.random() > 0.1 else -1 for s in slots]
    fixed = [rng.choice([-1, -1, -1, 0, 1, G + 1]) for _ in range(R)]
    return confidence, tokens, starts, limits, slots, fixed


@BACKENDS
@pytest.mark.parametrize(("R", "G", "levels"), [(1, 1, 0), (3, 5, 3), (17, 5, 0), (40, 7, 2), (33, 8, 1), (200, 5, 4)])
def test_equals_a_stable_sort(backend, R, G, levels):
    for seed in range(8):
        confidence, tokens, starts, limits, slots, fixed = make(R, R + 5, G, seed, levels)
        needed = sum(
            1 + max(0, min(f, lim, G)) for f, lim, s in zip(fixed, limits, slots, strict=True) if min(lim, s) >= 0
        )
        for budget in (0, 1, R, 2 * R + 1, R * G, 10**9):
            for spare in (0, R, R * G):
                capacity = max(1, needed) + spare
                with kernel_core.using(backend):
                    got = schedule(
                        confidence, tokens, starts, i32(limits), budget, capacity, slots=i32(slots), fixed=i32(fixed)
                    )
                wanted = expected_lengths(confidence, limits, slots, fixed, budget, capacity)
                assert got.lengths.tolist() == wanted, (seed, budget, spare)
                check_layout(got, tokens, starts, limits, slots, capacity)


def check_layout(got, tokens, starts, limits, slots, capacity):
    width, rows = tokens.shape[1], []
    cu = [0]
    row_of = torch.full((len(limits), width), -1, dtype=torch.int32)
    for r, length in enumerate(got.lengths.tolist()):
        there = limits[r] >= 0 and slots[r] >= 0
        for j in range(length + 1 if there else 0):
            row_of[r, j] = len(rows)
            rows.append((r, j, slots[r] * width + j, int(tokens[slots[r], j]), int(starts[slots[r]]) + j))
        cu.append(len(rows))
        assert int(got.kv_lengths[r]) == (int(starts[slots[r]]) + 1 + length if there else 0)
    used = len(rows)
    rows += [(-1, 0, -1, 0, 0)] * (capacity - used)
    found = zip(*(t.tolist() for t in (got.owner, got.place, got.source, got.tokens, got.positions)), strict=True)
    assert list(found) == rows
    assert got.cu_rows.tolist() == cu
    assert_bitwise(got.row_of, row_of)
    assert got.host.tolist() == [*got.lengths.tolist(), used]


def simple(confidence, budget, capacity=64, **options):
    S, G = confidence.shape
    limits = options.pop("limits", i32([G] * S))
    return schedule(confidence, torch.zeros(S, 1 + G, dtype=torch.int64), torch.zeros(S, dtype=torch.int64), limits,
                    budget, capacity, **options)  # fmt: skip


@BACKENDS
def test_ties_go_to_lower_places_then_lower_requests(backend):
    with kernel_core.using(backend):
        for budget, wanted in ((1, [1, 0, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (7, [3, 2, 2]), (9, [3, 3, 3])):
            assert simple(torch.ones(3, 3), budget).lengths.tolist() == wanted


@BACKENDS
def test_ties_of_zero_and_nan(backend):
    """A draft of no known chance is verified last, and still a prefix."""
    confidence = torch.tensor([[NAN, 1.0], [0.5, -1.0], [-0.0, 0.9], [0.2, 0.2]])
    with kernel_core.using(backend):
        assert simple(confidence, 3).lengths.tolist() == [0, 1, 0, 2]
        assert simple(confidence, 4).lengths.tolist() == [1, 1, 0, 2]
        assert simple(confidence, 6).lengths.tolist() == [2, 1, 1, 2]
        assert simple(confidence, 8).lengths.tolist() == [2, 2, 2, 2]
        assert simple(confidence, 8).survival.tolist()[0] == [0, 0]


@BACKENDS
def test_a_budget_may_be_a_tensor(backend):
    confidence = torch.rand(6, 5)
    with kernel_core.using(backend):
        for budget in (0, 7, 30):
            assert_bitwise(simple(confidence, budget).lengths, simple(confidence, i32([budget])).lengths)
        assert int(simple(confidence, i32([-4])).lengths.sum()) == 0


def test_a_longer_confidence_of_one_request_does_not_move_its_earlier_drafts():
    """Whether draft k is verified depends on confidences up to k of its own request: what exactness rests on."""
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        confidence = (torch.rand(8, 5, generator=g) * 4).round() / 4
        for budget in (3, 11, 20):
            before = simple(confidence, budget).lengths
            for k in range(1, 5):
                changed = confidence.clone()
                changed[2, k:] = torch.rand(5 - k, generator=g)
                after = simple(changed, budget).lengths
                assert min(int(before[2]), k) == min(int(after[2]), k)


def test_survival_never_rises():
    confidence = torch.rand(500, 8)
    confidence[:100] = confidence[:100].round()
    confidence[::7, 3] = NAN
    alive = survival(confidence)
    assert bool((alive[:, 1:] <= alive[:, :-1]).all()) and bool((alive >= 0).all())
    assert not bool(torch.signbit(survival(torch.tensor([[-0.0, 0.5]]))).any())
    assert_bitwise(alive, simple(confidence, 0, 500).survival)


@BACKENDS
def test_results_go_to_the_room_that_is_given(backend):
    confidence = torch.rand(4, 3)
    room = new_schedule(4, 3, 16)
    host = torch.full((5,), -7, dtype=torch.int32)
    with kernel_core.using(backend):
        fresh = simple(confidence, 5, 16)
        result = simple(confidence, 5, 16, out=room, host=host)
    for a, b in zip(fresh, result, strict=True):
        assert_bitwise(a, b)
    assert result.tokens is room.tokens and result.host is host


@BACKENDS
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("confidence", {"confidence": torch.zeros(2, 9)}),
        ("confidence", {"confidence": torch.zeros(2, 3, dtype=torch.float64)}),
        ("tokens", {"tokens": torch.zeros(2, 3, dtype=torch.int64)}),
        ("starts", {"starts": torch.zeros(2, dtype=torch.int32)}),
        ("limits", {"limits": i32([1, -2])}),
        ("limits", {"limits": i32([1])}),
        ("limits", {"limits": torch.ones(2)}),
        ("slots", {"slots": i32([0, 2])}),
        ("slots", {"slots": i32([-2, 1])}),
        ("slots", {"slots": i32([1])}),
        ("fixed", {"fixed": i32([1])}),
        ("budget", {"budget": -1}),
        ("budget", {"budget": torch.tensor([1])}),
        ("capacity", {"capacity": 0}),
        ("capacity", {"capacity": 1}),
        ("capacity", {"capacity": 4, "fixed": i32([2, 1])}),
        ("host", {"host": torch.zeros(2, dtype=torch.int32)}),
        ("out", {"out": new_schedule(2, 3, 7)}),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(backend, name, change):
    room = new_schedule(2, 3, change.get("capacity", 8))
    for tensor in room:
        tensor.fill_(-5)
    arguments = {
        "confidence": torch.rand(2, 3), "tokens": torch.zeros(2, 4, dtype=torch.int64),
        "starts": torch.zeros(2, dtype=torch.int64), "limits": i32([3, 3]), "budget": 3, "capacity": 8, "out": room,
        **change,
    }  # fmt: skip
    with kernel_core.using(backend), pytest.raises(ValueError, match=f"{name}.*got .* allowed"):
        schedule(**arguments)
    assert all(bool((t == -5).all()) for t in room)


def test_rows_that_do_not_fit_on_a_device_make_every_request_padding():
    """What kernels do, where nobody can be told before the launch."""
    got = dspark_kernels.reference_schedule.schedule(
        torch.ones(2, 3), torch.ones(2, 4, dtype=torch.int64), torch.ones(2, dtype=torch.int64), i32([3, 3]), 6, 4,
        None, i32([2, 1]),
    )  # fmt: skip
    assert got.host.tolist() == [0, 0, -5] and got.cu_rows.tolist() == [0, 0, 0]
    assert got.owner.tolist() == [-1] * 4 and got.kv_lengths.tolist() == [0, 0]


def test_dispatcher():
    confidence, tokens, starts, limits, slots, fixed = make(6, 9, 5, 1, 3)
    arguments = (confidence, tokens, starts, i32(limits), 9, 60)
    options = {"slots": i32(slots), "fixed": i32(fixed)}
    direct = schedule(*arguments, **options)
    for a, b in zip(direct, torch.ops.dspark_kernels.schedule(*arguments, **options), strict=True):
        assert_bitwise(a, b)
