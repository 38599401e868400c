"""Experts change places while requests run: the same tokens before, during and after."""

from __future__ import annotations

import time

import pytest
from ep_kit import EpOptions, alone, config, requests, start, together

from orchestrator.balance.eplb import EplbSettings, initial
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


@pytest.mark.parametrize(
    "late", [None, "prepare", "chunk", "arrived", "acknowledge"], ids=lambda late: f"late {late}" if late else "in time"
)
def test_tokens_before_during_and_after(nano, digests, late):
    asked = requests(4, tokens=24)
    expected = alone(nano, asked)
    workers = {}
    # An expert has 6,528 bytes: it takes two steps.
    options = EpOptions(3, engine=config(), eplb=ALWAYS, bytes_per_step=4000)
    group = start(nano, options, workers=workers, delays=lambda kind: 2 if kind == late else 0)
    heard = together(group, asked)
    coordinator, limit = workers[0].rank.leader.coordinator, time.monotonic() + 20
    while not coordinator.counts["committed"] and time.monotonic() < limit:
        group.poll(0.01)  # what is under way is carried to its end by agreements without a step
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


def test_a_plan_that_stalls_is_dropped_and_counted(nano, digests):
    asked = requests(3, tokens=60)
    workers = {}
    options = EpOptions(3, engine=config(), eplb=ALWAYS, patience=6)
    group = start(nano, options, workers=workers, delays=lambda kind: 10**6 if kind == "acknowledge" else 0)
    assert together(group, asked) == alone(nano, asked)
    group.close()
    plans = group.left[0].plans
    assert plans["dropped: stalled"] >= 1 and "committed" not in plans
    held_as_planned(group, workers, digests)


def test_balance_is_reported(nano):
    group = start(nano, EpOptions(2, engine=config(), eplb=EplbSettings(redundant=0, window=8, interval=8)))
    together(group, requests(4, tokens=30))
    group.close()
    reports = group.left[0].moe_lb
    assert len(reports) >= 3 and all(1.0 <= value <= 2.0 for value in reports)
