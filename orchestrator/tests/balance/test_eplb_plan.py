"""Plans hold their rules on any shape and load, and reach their figures on the synthetic ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.balance.eplb import (
    DECODE,
    PREFILL,
    EplbSettings,
    MoveLimits,
    Placement,
    initial,
    moe_lb,
    plan,
    rank_loads,
    smallest_slots,
)
from orchestrator.balance.eplb.planner import grouped, plan_full, plan_swaps, with_floor
from orchestrator.balance.eplb.published import plan_by_sums
from orchestrator.balance.eplb.relabel import relabel
from orchestrator.balance.eplb.report import as_text, compare, report
from orchestrator.balance.eplb.synthetic import ALIKE, BURSTY, MILD, draw

EAGER = EplbSettings(redundant=1, window=4, interval=8, least_gain=0.0, least_tokens=0)


@st.composite
def situations(draw_):
    """Experts, ranks (some dead), slots with room for all experts, and loads of few or many hot experts, or none."""
    experts = draw_(st.integers(1, 17))
    living, dead = draw_(st.integers(1, 7)), draw_(st.integers(0, 3))
    slots = smallest_slots(experts, living) + draw_(st.integers(0, 4))
    rng = np.random.default_rng(draw_(st.integers(0, 10**6)))
    alive = rng.permutation(np.arange(living + dead) < living)
    loads = rng.lognormal(2, draw_(st.sampled_from([0.1, 1.0, 4.0])), (3, 2, experts)) * draw_(st.sampled_from([0, 1]))
    return experts, slots, alive, loads.round().astype(np.float32)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(situations())
def test_full_plans_place_everything_once_a_rank_on_ranks_alive(situation):
    experts, slots, alive, loads = situation
    now = initial(2, experts, len(alive), slots)
    target = plan_full(with_floor(loads, 0.01), now, alive, refine=4)
    target.check(alive)
    # No slot is wasted: all that a rank can hold without a second copy is held.
    assert ((target.experts[:, alive] >= 0).sum(2) == min(slots, experts)).all()
    assert (plan_full(with_floor(loads, 0.01), now, alive, refine=4).experts == target.experts).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(situations(), st.integers(0, 6), st.integers(1, 3), st.sampled_from([0, 2]))
def test_swaps_keep_the_rules_and_their_limits_and_never_make_it_worse(situation, swaps, per_rank, domain):
    experts, slots, alive, loads = situation
    floored = with_floor(loads, 0.01)
    now = plan_full(floored[::-1] ** 0.5, initial(2, experts, len(alive), slots), alive, refine=0)
    limits = MoveLimits(swaps=swaps, per_rank=per_rank, domain=domain, across=1)
    after = plan_swaps(floored, now, alive, limits)
    after.check(alive)
    changed = after.experts != now.experts
    assert changed.sum((1, 2)).max() <= 2 * swaps
    assert changed.sum(2).max() <= per_rank
    before_peaks, after_peaks = (rank_loads(p, floored).max(2).sum(0) for p in (now, after))
    assert (after_peaks <= before_peaks * (1 + 1e-5)).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(situations())
def test_lost_experts_are_placed_again_whatever_the_traffic(situation):
    experts, slots, alive, loads = situation
    now = initial(2, experts, len(alive), slots)
    for window in (loads, loads[:0]):
        decision = plan(window, now, PREFILL, alive, domain=2)
        decision.placement.check(alive)
        lost = (now.without(alive).copies() == 0).any()
        assert decision.reason == "repair" if lost else decision.reason != "repair"


def test_an_exchange_across_slow_links_is_made_only_where_it_pays():
    rng = np.random.default_rng(0)
    loads = with_floor(rng.lognormal(3, 1, (5, 1, 24)), 0.01)
    now, alive = initial(1, 24, 8, 4), np.ones(8, np.bool_)

    def crossing(limits):
        """Experts that came to a domain which had none of them."""
        after = plan_swaps(loads, now, alive, limits).experts[0].reshape(2, -1)
        return sum(len(np.setdiff1d(b, a)) for a, b in zip(now.experts[0].reshape(2, -1), after, strict=True))

    assert crossing(MoveLimits(domain=4, across=8)) > 0
    assert crossing(MoveLimits(domain=4, across=0)) == 0
    assert crossing(MoveLimits(domain=4, across=8, gain_across=0.99)) == 0
    assert crossing(MoveLimits(domain=4, across=1)) <= 2


def test_one_hot_expert_gets_a_copy_a_rank_and_no_more():
    loads = np.full((3, 1, 8), 1.0, np.float32)
    loads[:, :, 5] = 1000.0
    target = plan(loads, initial(1, 8, 4, 4), EAGER).placement
    target.check()
    assert target.copies()[0, 5] == 4
    # The published rule puts several of its copies on one rank.
    with pytest.raises(ValueError, match="twice on"):
        plan_by_sums(loads, 4, 4).check()


def test_experts_hot_in_different_steps_may_share_a_rank_and_those_of_one_step_not():
    loads = np.full((2, 1, 4), 1.0, np.float32)
    loads[0, 0, [0, 1]] = loads[1, 0, [2, 3]] = 100.0
    target = plan(loads, initial(1, 4, 2, 2), EAGER).placement
    sides = [set(row) for row in target.experts[0].tolist()]
    assert all(len(side & {0, 1}) == 1 for side in sides)
    assert moe_lb(rank_loads(target, loads)) == 1.0


def test_nothing_moves_for_too_few_tokens_or_too_little_gain():
    now = initial(2, 16, 4, 5)
    loads = draw(ALIKE, 8, 2, 16, seed=0)
    first = plan(loads, now, PREFILL)
    assert first.moves and first.reason == "gain" and first.after < first.before
    again = plan(loads, first.placement, PREFILL)
    assert not again.moves and again.reason == "too little gain" and again.placement.experts is not now.experts
    quiet = plan(loads / 1e4, now, PREFILL)
    assert not quiet.moves and quiet.reason == "too few tokens"
    assert (quiet.placement.experts == now.experts).all()


def test_long_windows_are_summed_to_few_steps():
    loads = np.random.default_rng(0).poisson(5.0, (1000, 2, 8)).astype(np.float32)
    short = grouped(loads, 128)
    assert short.shape == (125, 2, 8)
    assert (short[3] == loads[24:32].sum(0)).all() and (short.sum(0) == loads.sum(0)).all()
    assert grouped(loads[:130], 128).shape[0] == 65
    assert (grouped(loads[:100], 128) == loads[:100]).all()
    decision = plan(loads, initial(2, 8, 4, 3), EAGER)
    decision.placement.check()
    assert decision.after < decision.before


def test_relabelled_ranks_keep_what_stays():
    rng = np.random.default_rng(1)
    now = initial(1, 20, 6, 4).experts[0]
    shuffled = np.stack([rng.permutation(row) for row in now[rng.permutation(6)]])
    assert (relabel(shuffled, now, 20) == now).all()


def test_settings_of_both_engines_and_when_plans_are_due():
    assert (PREFILL.redundant, PREFILL.window, PREFILL.interval) == (4, 100, 1000)
    assert (DECODE.redundant, DECODE.window, DECODE.interval) == (1, 1000, 10_000)
    assert [step for step in range(2500) if PREFILL.due(step)] == [250, 1000, 2000]
    assert not any(EplbSettings(redundant=0, window=1, interval=0).due(step) for step in range(10))
    with pytest.raises(ValueError, match="interval: got 5, allowed is 0, or 10"):
        EplbSettings(redundant=0, window=10, interval=5)


def test_bad_arguments_name_themselves():
    with pytest.raises(ValueError, match="slots: got 6 on 63 ranks"):
        initial(1, 384, 63, 6)
    now = initial(1, 8, 4, 2)
    with pytest.raises(ValueError, match="loads: got NaN"):
        plan(np.full((2, 1, 8), np.nan), now, EAGER)
    with pytest.raises(ValueError, match="loads: got \\[2, 1, 7\\]"):
        plan(np.ones((2, 1, 7)), now, EAGER)
    with pytest.raises(ValueError, match="slots: got 2 on 3 ranks"):
        plan(np.ones((2, 1, 8)), now, EAGER, np.array([True, True, True, False]))
    with pytest.raises(ValueError, match="experts: got int64, allowed is int32"):
        Placement(now.experts.astype(np.int64), 8)


def test_moe_lb_is_a_ratio_of_sums():
    received = np.array([[[4.0, 0.0]], [[1.0, 1.0]]])
    assert moe_lb(received) == (4 + 1) / (2 + 1)
    assert moe_lb(received, np.array([True, False])) == 1.0
    assert moe_lb(np.zeros((1, 1, 2))) == 1.0


@pytest.mark.parametrize(("load", "published", "most"), [(ALIKE, 1.05, 1.06), (MILD, 1.31, 1.13), (BURSTY, 1.70, 1.18)])
def test_figures_at_ep64_with_seven_slots(load, published, most):
    row = compare("", draw(load, 228, 4, 384, seed=1), 64, 7)
    assert row.published >= published
    assert row.full <= most
    assert row.full <= row.published


def test_smaller_groups_and_nine_failures():
    loads = draw(MILD, 228, 2, 384, seed=2)
    assert compare("", loads, 32, 13).full <= 1.06
    after_failures = compare("", loads, 64, 7, dead=9)  # 385 slots: one spare copy
    assert after_failures.full < 0.9 * after_failures.published


def test_swaps_recover_a_drifted_load_with_few_moves():
    before, loads = draw(ALIKE, 100, 2, 384, 3), draw(ALIKE, 228, 2, 384, 3, drift=0.4)
    row = compare("", loads, 64, 7, before=before)
    assert row.full < row.swaps < row.stale
    assert row.swaps - row.full < 0.5 * (row.stale - row.full)
    assert row.slots_swapped <= 64 < row.slots_moved


def test_the_report_has_a_row_a_load_and_shape():
    text = as_text(report(layers=1, shapes=((32, 0, 13),)))
    assert text.count("\n") == 4 and "| bursty topics | 32 | 13 |" in text
