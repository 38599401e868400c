"""Every kind of fault strikes and is repaired; schedules come from the seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from orchestrator.simulate.faults import MENU, Fault, find, schedule
from orchestrator.simulate.run import simulate
from orchestrator.simulate.scenario import Scenario, Shape, draw
from orchestrator.simulate.toy.engine import EngineShape
from orchestrator.simulate.workload import Mix
from orchestrator.simulate.world import World

ENGINE = EngineShape(blocks=60, ranks=3, fewest=2, launch=0.1)
SHAPE = Shape(prefill=ENGINE, decode=ENGINE)
CALM = Scenario(3, 25.0, SHAPE, Mix(rate=0.7, largest=60 * 128), every=0.0)


@pytest.mark.parametrize("name", MENU)
def test_each_kind_alone_is_survived(name):
    struck = 0
    for seed in (1, 2):
        result = simulate(replace(CALM, seed=seed, every=3.0, kinds=(name,)))
        assert result.ok, result.line
        assert result.outcomes["finished"] > 8
        struck += result.counts.get(f"fault {name}", 0)
        assert set(key for key in result.counts if key.startswith("fault ")) <= {f"fault {name}"}
    assert struck > 3


@pytest.mark.parametrize("name", MENU)
def test_each_kind_says_what_it_is_and_undoes_what_it_did(name):
    kind = find(name)
    assert kind.__doc__ and kind.weight > 0 and kind.longest > 0
    world = World(replace(CALM, mix=Mix(rate=1e-6)))
    world._until(4.0)
    world.machines["scaler"].crash()  # or it would send idle workers away
    quality, clean = world.network.quality, _state(world)
    random = Random(name)
    for _ in range(5):
        fault = kind.draw(world, random, world.queue.now)
        assert fault is not None and fault.kind == name and str(fault).startswith(name)
        kind.begin(world, fault)
        if fault.seconds:
            kind.end(world, fault)
        world._until(world.queue.now + 12.0)
    assert world.network.quality is quality and _state(world) == clean


def _state(world):
    disks = [(d.up, d.full, d.torn, d.misdirected, d.flipped) for d in world.store.disks.values()]
    engines = {(e.hang, e.nan, e.speed) for e in world.engines.values()}
    machines = {(m.up, m.busy, m.paused) for name, m in world.machines.items() if name != "scaler"}
    return disks, engines, machines, world.store.up, len(world.machines), world.network._cut


def test_schedules_come_from_the_seed_and_keep_to_their_kinds():
    world = World(CALM)
    made = schedule(world, Random(5), 10.0, 400.0, 4.0)
    assert made == schedule(world, Random(5), 10.0, 400.0, 4.0) != schedule(world, Random(6), 10.0, 400.0, 4.0)
    assert all(10.0 <= fault.at < 400.0 for fault in made) and [f.at for f in made] == sorted(f.at for f in made)
    assert len({fault.kind for fault in made}) > 15 and 60 < len(made) < 160
    only = schedule(world, Random(5), 10.0, 400.0, 4.0, ["crash", "rot"])
    assert {fault.kind for fault in only} == {"crash", "rot"}
    assert schedule(world, Random(5), 10.0, 400.0, 4.0, []) == []
    with pytest.raises(ValueError, match="fault: got 'meteor'"):
        find("meteor")


def test_a_machine_that_left_is_stood_in_for():
    world = World(CALM)
    world._until(2.0)
    world.drain("decode-0", 0.0)
    world._until(8.0)
    assert "decode-0" not in world.machines and "decode-2" in world.machines
    world.plan(Fault("crash", 9.0, 2.0, ("decode-0",)))
    world._until(10.0)
    assert not world.machines["decode-2"].up and world.machines["decode-1"].up
    world._until(12.0)
    assert world.machines["decode-2"].up


def test_every_kind_is_drawn_in_some_run():
    assert {name for seed in range(60) for name in draw(seed, 1.0).kinds} == set(MENU)
