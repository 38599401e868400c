"""A decode group's experts under the simulator: plans run beside the steps, and what is wrong is noticed."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.simulate.queue import EventQueue
from orchestrator.simulate.toy.group import EXPERTS, ExpertGroup, slots_for


def make(ranks, fewest=1, seed=0):
    queue, wrongs = EventQueue(Random(seed)), []
    group = ExpertGroup("d", ranks, fewest, queue, Random(seed), lambda number, what: wrongs.append((number, what)))
    return queue, group, wrongs


def run(queue, group, steps, seconds=0.1):
    for _ in range(steps):
        group.step()
        until = queue.now + seconds
        while queue.next_time is not None and queue.next_time <= until:
            queue.step()
        queue.now = until


@pytest.mark.parametrize(("ranks", "fewest"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_plans_are_carried_out(ranks, fewest):
    queue, group, wrongs = make(ranks, fewest)
    run(queue, group, 300)
    assert not wrongs and set(group.steps.values()) == {300}
    assert (group.version > 2) == (slots_for(fewest) < EXPERTS)  # else every rank holds all
    assert group.coordinator.counts["committed"] >= (group.version > 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("after", [5, 26, 40])
def test_a_dead_rank_and_the_group_that_forms_anew(seed, after):
    queue, group, wrongs = make(4, 2, seed)
    run(queue, group, after)
    for _ in range(2):
        group.died(min(group.ranks))
        group.begin_again()
        for _ in range(60):
            if group.load():
                break
            queue.now += 0.1
            while queue.next_time is not None and queue.next_time <= queue.now:
                queue.step()
        assert group.complete
        run(queue, group, 60)
    assert not wrongs and len(group.ranks) == 2


def test_a_copy_that_stalls_ends_its_plan():
    queue, group, wrongs = make(3, 2)
    group.deaf = {0, 1, 2}
    run(queue, group, 120)
    assert group.coordinator.counts["dropped: stalled"] >= 1 and not wrongs
    group.deaf.clear()
    run(queue, group, 200)
    assert group.coordinator.counts["committed"] >= 1 and not wrongs


@pytest.mark.parametrize("how", ["weights", "table", "steps", "lost"])
def test_what_is_wrong_is_noticed(how):
    queue, group, wrongs = make(2)
    run(queue, group, 3)
    rank = group.ranks[1]
    if how == "weights":
        group._memory[1][rank.live[0, 0]][2] += 1
    elif how == "table":
        rank.table[0, 0, 0] = (rank.table[0, 0, 0] + 1) % EXPERTS
    elif how == "steps":
        group.steps[1] += 1
    else:
        group.coordinator.placement.experts[group.coordinator.placement.experts == 2] = 3
    group._unsure = True
    group.step()
    assert wrongs and all(number == 6 for number, _ in wrongs)
