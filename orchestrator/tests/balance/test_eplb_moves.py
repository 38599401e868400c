"""Plans carried out under delays, stalls and crashes: weights, routing and placement agree in every step."""

from __future__ import annotations

import random

import numpy as np
import pytest
from eplb_kit import EXPERT_BYTES, Group

from orchestrator.balance.eplb import PREFILL, Coordinator, EplbSettings, Placement, RankSlots, initial, plan
from orchestrator.balance.eplb.messages import Acknowledge, Flip, Turn
from orchestrator.balance.eplb.moves import CHECKPOINT, Move, moves_of
from orchestrator.balance.eplb.planner import plan_full, plan_swaps
from orchestrator.balance.eplb.swaps import MoveLimits
from orchestrator.balance.eplb.synthetic import MILD, draw

SETTINGS = EplbSettings(redundant=1, window=4, interval=8, least_gain=0.0, least_tokens=0)


def loads_of(seed: int, layers: int, experts: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(3, 1, (4, layers, experts)).astype(np.float32)


def group(seed: int, *, spares: int = 3, bytes_per_step: int = 5, patience: int = 60, delay: int = 3) -> Group:
    return Group(
        initial(2, 11, 5, 3), spares=spares, bytes_per_step=bytes_per_step, patience=patience, seed=seed, delay=delay
    )


def full_target(g: Group, seed: int) -> Placement:
    now = g.coordinator.placement
    return plan_full(loads_of(seed, now.layers, now.num_experts), now, g.coordinator.alive)


@pytest.mark.parametrize("seed", range(8))
def test_plans_with_delays_end_where_they_should(seed):
    g = group(seed)
    for round_ in range(3):
        target = full_target(g, 10 * seed + round_)
        assert g.coordinator.offer(target, g.step) == round_ + 1
        g.run(90)
        assert not g.coordinator.busy
        assert (g.coordinator.placement.experts == target.experts).all()
    assert g.coordinator.counts["committed"] == 3
    assert g.coordinator.bytes_moved % EXPERT_BYTES == 0


def test_a_second_plan_is_refused_and_counted():
    g = group(0)
    g.coordinator.offer(full_target(g, 1), 0)
    g.run(2)
    assert g.coordinator.busy
    assert g.coordinator.offer(full_target(g, 2), 2) is None
    assert g.coordinator.counts["refused: busy"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_stalled_plan_is_dropped_counted_and_the_next_works(seed, caplog):
    g = group(seed, patience=20)
    g.run(1)
    g.deaf = {0, 1, 2, 3, 4}
    g.coordinator.offer(full_target(g, seed), g.step)
    g.run(40)
    assert not g.coordinator.busy
    assert g.coordinator.counts["dropped: stalled"] == 1
    assert "waits for ranks [0, 1, 2, 3, 4]" in caplog.text
    # Copies of the dropped plan end late, among those of the next one.
    target = full_target(g, seed + 50)
    assert g.coordinator.offer(target, g.step) == 2
    g.run(2)
    g.deaf = set()
    g.run(120)
    assert (g.coordinator.placement.experts == target.experts).all()
    assert [slots.spare for slots in g.ranks.values()] == [3] * 5  # no buffer was lost


@pytest.mark.parametrize("seed", range(24))
def test_any_history(seed):
    rng = random.Random(seed)
    g = group(seed, bytes_per_step=rng.choice([2, 5, 40]), delay=rng.choice([0, 2, 6]), patience=rng.choice([6, 60]))
    kills = 0
    for _ in range(25):
        event = rng.choice(["full", "swaps", "run", "stall", "heal", "kill"])
        c = g.coordinator
        if event == "kill" and kills == 0:  # 4 ranks of 3 slots hold the 11 experts, 3 do not
            g.kill(rng.choice(sorted(g.ranks)))
            kills = 1
            decision = plan(loads_of(seed, 2, 11)[:0], c.placement, SETTINGS, c.alive)
            if decision.moves:
                assert c.offer(decision.placement, g.step) is not None
        elif event == "stall":
            g.deaf = {rng.choice(sorted(g.ranks))}
        elif event == "heal":
            g.deaf = set()
        elif event in ("full", "swaps") and not c.busy and not (c.placement.copies() == 0).any():
            load = loads_of(rng.randrange(1000), 2, 11)
            limits = MoveLimits(swaps=3, per_rank=2)
            target = (
                plan_full(load, c.placement, c.alive)
                if event == "full"
                else plan_swaps(load, c.placement, c.alive, limits)
            )
            c.offer(target, g.step)
        g.run(rng.randint(1, 25))
    g.deaf, c = set(), g.coordinator
    c.patience = 60  # some runs had less than their delays take
    g.run(100)
    if (c.placement.copies() == 0).any():  # its repair was dropped by a stall: the next round brings it again
        c.offer(plan(loads_of(seed, 2, 11)[:0], c.placement, SETTINGS, c.alive).placement, g.step)
        g.run(100)
    c.placement.check(c.alive)
    target = full_target(g, seed)
    c.offer(target, g.step)
    g.run(200)
    assert (c.placement.experts == target.experts).all()
    assert c.counts["started"] == sum(n for name, n in c.counts.items() if name.startswith(("committed", "dropped")))


@pytest.mark.parametrize("seed", range(3))
def test_a_crash_at_any_step_starts_again_from_what_survivors_hold(seed):
    lost = 0
    for steps in range(1, 24):
        g = group(seed, delay=1, bytes_per_step=40)
        g.coordinator.offer(full_target(g, seed), 0)
        g.run(steps)
        g.kill((seed + steps) % 5)
        lost += int((g.coordinator.placement.copies() == 0).any())
        decision = plan(loads_of(seed, 2, 11), g.coordinator.placement, SETTINGS, g.coordinator.alive)
        decision.placement.check(g.coordinator.alive)
        g.coordinator.offer(decision.placement, g.step)
        g.run(30)
        assert (g.coordinator.placement.experts == decision.placement.experts).all()
        assert [slots.spare for slots in g.ranks.values()] == [3] * 4  # none is kept for the plan that ended
    assert lost > 0  # some crash took an expert's last copy, which came back from the checkpoint


def test_sources_are_alive_and_near():
    everyone = np.ones(4, np.bool_)
    now = np.array([[0, 1], [2, 3], [0, 2], [1, 3]], np.int32)
    then = now.copy()
    then[1, 0] = 0
    assert moves_of(now, then, everyone, domain=2) == [Move(1, 0, 0, 0, 0)]
    assert moves_of(now, then, np.array([False, True, True, True]), domain=2) == [Move(1, 0, 0, 2, 0)]
    assert moves_of(now, then, np.array([False, True, False, True])) == [Move(1, 0, 0, CHECKPOINT, -1)]
    assert moves_of(now, then, np.array([True, False, True, True])) == []
    two = now[::-1].copy()  # every copy has two sources or itself: none sends more than it must
    sends = [m.source_rank for m in moves_of(now, two, everyone)]
    assert len(sends) == 8 and max(sends.count(rank) for rank in range(4)) <= 3


def test_late_and_strange_acknowledgements_change_nothing():
    g = group(3)
    g.coordinator.acknowledge(Acknowledge(7, 0, 0), 0)
    g.coordinator.offer(full_target(g, 3), 0)
    g.coordinator.acknowledge(Acknowledge(1, 0, 0), 0)  # before the rank was told anything
    assert g.coordinator.counts["late"] == 2
    g.run(90)
    assert g.coordinator.counts["committed"] == 1


def test_a_flip_without_bytes_is_refused():
    slots = RankSlots(0, initial(1, 4, 2, 2), 1)
    with pytest.raises(RuntimeError, match="layer 0 of plan 1 flips but was not ready"):
        slots.begin(Turn(0, flips=(Flip(1, 0, np.zeros((2, 2), np.int32), ()),)))


def test_bad_plans_are_refused_before_anything_moves():
    now = initial(1, 4, 3, 2)
    coordinator = Coordinator(now, 10, bytes_per_step=10, spares=1)
    with pytest.raises(ValueError, match="target: got 2 moves into one rank"):
        coordinator.offer(Placement(now.experts[:, [1, 0, 2]].copy(), 4), 0)
    lacking = now.experts.copy()
    lacking[lacking == 3] = 0
    with pytest.raises(ValueError, match="each at least once"):
        coordinator.offer(Placement(lacking, 4), 0)
    with pytest.raises(ValueError, match="bytes_per_step: got 0"):
        Coordinator(now, 10, bytes_per_step=0, spares=1)
    assert not coordinator.busy and coordinator.offer(now, 0) is None


def test_ep64_and_an_ep55_after_nine_failures_carry_real_plans_out():
    now = initial(1, 384, 64, 7)
    loads = draw(MILD, 40, 1, 384, seed=4)
    g = Group(now, spares=7, bytes_per_step=2 * EXPERT_BYTES, patience=50, seed=4, delay=1)
    first = plan(loads, now, PREFILL)
    assert first.moves and g.coordinator.offer(first.placement, 0) == 1
    g.run(14)
    assert (g.coordinator.placement.experts == first.placement.experts).all()
    for rank in (3, 9, 17, 21, 30, 38, 44, 52, 63):
        g.kill(rank)
        repaired = plan(loads[:0], g.coordinator.placement, PREFILL, g.coordinator.alive)
        if repaired.moves:  # else every expert of the rank has another copy
            assert g.coordinator.offer(repaired.placement, g.step) is not None
            g.run(8)
        g.coordinator.placement.check(g.coordinator.alive)
    assert g.coordinator.alive.sum() == 55
    last = plan(loads, g.coordinator.placement, PREFILL, g.coordinator.alive)
    assert last.moves and g.coordinator.offer(last.placement, g.step) is not None
    g.run(16)
    assert (g.coordinator.placement.experts == last.placement.experts).all()
    assert last.after < last.before
