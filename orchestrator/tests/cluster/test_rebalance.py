"""Experts change places while requests run: the same tokens before, during and after."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from ep_kit import EpOptions, alone, config, requests, start, together

from orchestrator.balance.eplb import EplbSettings, MoveLimits, initial
from orchestrator.engine.launch import InOrder
from orchestrator.engine.launch import Worker as Behind
from orchestrator.model.expert_parallel import ExpertPool, LoadedExperts
from orchestrator.model.expert_parallel.pool import ExpertShapes

ALWAYS = EplbSettings(redundant=1, window=8, interval=32, least_tokens=0.0, least_gain=0.0)


@pytest.fixture(scope="module")
def digests(nano):
    """SHA-256 of every expert of the model, by (layer, expert)."""
    config, source = nano.config, LoadedExperts(nano.weights)
    pool = ExpertPool(ExpertShapes.of(config.hidden_size, config.moe_intermediate_size), 1)
    found = {}
    for layer in range(config.num_hidden_layers):
        for expert in range(config.n_routed_experts):
            pool.write(0, 0, source.read(layer, expert))
            found[layer, expert] = pool.digest(0)
    assert len(set(found.values())) == len(found)
    return found


def held_as_planned(group, workers, digests):
    """All ranks have the same table, and each slot's bytes are those of the expert that it says."""
    tables = [worker.held.slots.table for worker in workers.values()]
    assert all((table == tables[0]).all() for table in tables)
    for number, said in group.left.items():
        rank = workers[number].held.rank
        for (layer, slot), (expert, digest) in said.digests.items():
            assert tables[0][layer, rank, slot] == expert and digests[layer, expert] == digest
    return tables[0]


def settled(group):
    """Carry what is under way to its end, by agreements without a step."""
    limit = time.monotonic() + 60
    while not group.balance.plans.get("committed") and time.monotonic() < limit:
        group.poll(0.01)


@pytest.mark.parametrize(
    ("late", "launcher"),
    [((), None), (("prepare", "arrived"), InOrder), (("chunk", "acknowledge"), Behind)],
    ids=["in time", "late prepare and arrived, overlapped", "late chunk and acknowledge, behind"],
)
def test_tokens_before_during_and_after(nano, digests, late, launcher):
    asked = requests(4, tokens=12)
    expected = alone(nano, asked)
    workers = {}
    # An expert has 6,528 bytes: it takes two steps.
    options = EpOptions(3, engine=config(), eplb=ALWAYS, bytes_per_step=4000)
    group = start(
        nano, options, workers=workers, delays=lambda kind: 2 if kind in late else 0, launcher=launcher
    )  # fmt: skip
    heard = together(group, asked)
    settled(group)
    assert together(group, asked[:2]) == {f"{4 + i}": expected[f"{i}"] for i in range(2)}
    group.close()
    assert heard == expected
    first = group.left[0]
    assert first.plans["started"] >= 1 and first.plans["committed"] >= 1 and not first.plans.get("dropped: stalled")
    table = held_as_planned(group, workers, digests)
    layers, ranks, slots = table.shape
    first_table = initial(layers, nano.config.n_routed_experts, ranks, slots).experts
    assert (table != first_table).any((1, 2)).sum() > layers // 2
    moved = sum(said.bytes_moved.get("from peers", 0) for said in group.left.values())
    assert moved > 0
    assert len({said.collectives for said in group.left.values()}) == 1


@pytest.mark.parametrize("across", [0, 8])
def test_between_domains_few_experts_move(nano, digests, across):
    """Four ranks in domains of two."""
    asked = requests(4, tokens=12)
    workers = {}
    plans = replace(ALWAYS, limits=MoveLimits(across=across, gain_across=0.0))
    group = start(nano, EpOptions(4, engine=config(), eplb=plans, domain=2), workers=workers)
    assert together(group, asked) == alone(nano, asked)
    settled(group)
    group.close()
    assert group.left[0].plans["committed"] >= 1
    held_as_planned(group, workers, digests)
    moved = [said.bytes_moved for said in group.left.values()]
    assert sum(m.get("from peers", 0) for m in moved) > 0
    assert (sum(m.get("from other domains", 0) for m in moved) > 0) == (across > 0)


def test_domains_are_those_of_workers(nano):
    """Behind a death ranks have other numbers; which links are fast does not change with them."""
    asked = requests(4, tokens=6)
    workers = {}
    options = EpOptions(4, slots=3, engine=config(), domain=2, timeout=2.0)
    group = start(nano, options, workers=workers, faults={1: ("dispatch", 15 * 4)})
    assert together(group, asked) == alone(nano, asked)
    members, leader = group.members, workers[0].rank.leader
    group.close()
    assert members == (0, 2, 3) and leader.domain == leader.coordinator._domain == (0, 1, 1)


def test_fewer_spare_buffers_than_slots(nano, digests):
    """No plan moves more experts into a rank's layer than there are buffers for."""
    asked = requests(4, tokens=16)
    workers = {}
    group = start(nano, EpOptions(3, engine=config(), eplb=ALWAYS, spares=1), workers=workers)
    assert together(group, asked) == alone(nano, asked)
    settled(group)
    group.close()
    assert group.left[0].plans["committed"] >= 1
    held_as_planned(group, workers, digests)


def test_a_plan_that_stalls_is_dropped_and_counted(nano, digests):
    asked = requests(3, tokens=24)
    workers = {}
    options = EpOptions(3, engine=config(), eplb=ALWAYS, patience=6)
    group = start(nano, options, workers=workers, delays=lambda kind: 10**6 if kind == "acknowledge" else 0)
    assert together(group, asked) == alone(nano, asked)
    group.close()
    plans = group.left[0].plans
    assert plans["dropped: stalled"] >= 1 and "committed" not in plans
    held_as_planned(group, workers, digests)


@pytest.mark.parametrize("statistics", ["prefill", "decode"])
def test_prompts_and_decoding_apart(nano, statistics):
    """What the ranks' windows hold together: the prompts' rows, or one row a token behind the first; both reported."""
    asked = requests(4, tokens=10)
    workers = {}
    plans = EplbSettings(redundant=0, window=128, interval=128)
    options = EpOptions(2, engine=config(speculation="off"), eplb=plans, statistics=statistics)
    group = start(nano, options, workers=workers)
    together(group, asked)
    group.close()
    windows = [worker.rank.counts.window.last() for worker in workers.values()]
    rows = {"prefill": sum(len(p) for p, _ in asked), "decode": sum(params.max_tokens - 1 for _, params in asked)}
    assert sum(window[:, 0].sum() for window in windows) == rows[statistics] * nano.config.num_experts_per_tok
    steps = group.left[0].counted
    assert {len(window) for window in windows} == {steps[statistics]} and steps["prefill"] < steps["decode"]


def test_balance_is_reported(nano):
    group = start(nano, EpOptions(2, engine=config(), eplb=EplbSettings(redundant=0, window=8, interval=8)))
    together(group, requests(4, tokens=16))
    group.close()
    first = group.left[0]
    assert len(first.moe_lb) >= 3 and all(1.0 <= value <= 2.0 for value in first.moe_lb)
    assert set(first.moe_lb_of) == {"prefill", "decode"}
