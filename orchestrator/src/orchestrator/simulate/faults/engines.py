"""Faults of engines: not a number, steps that never end, slow steps, ranks that die."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from orchestrator.simulate.faults.base import Fault, FaultKind
from orchestrator.simulate.faults.machines import draw_machine

if TYPE_CHECKING:
    from orchestrator.simulate.toy.engine import ToyEngine
    from orchestrator.simulate.world import World

WORKERS = ("encoder", "prefill", "decode")


class _OneEngine(FaultKind):
    """Strikes the engine of one worker, if it runs then."""

    roles: tuple[str, ...] = WORKERS

    def amount(self, random: Random) -> float:
        return 0.0

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        name = draw_machine(world, random, *self.roles)
        return None if name is None else Fault(self.name, at, self.lasting(random), (name,), self.amount(random))

    def begin(self, world: World, fault: Fault) -> None:
        engine = world.engines.get(fault.targets[0])
        if engine is not None:
            self.strike(engine, fault.amount)

    def strike(self, engine: ToyEngine, amount: float) -> None:
        raise NotImplementedError


class NotANumber(_OneEngine):
    """Some rows have no distribution."""

    name = "nan_logits"

    def amount(self, random: Random) -> float:
        return float(random.randint(1, 4))

    def strike(self, engine: ToyEngine, amount: float) -> None:
        engine.nan += int(amount)

    def end(self, world: World, fault: Fault) -> None:
        engine = world.engines.get(fault.targets[0])
        if engine is not None:
            engine.nan = 0


class HungStep(_OneEngine):
    """The next step never ends; the node's watchdog ends the process in time."""

    name = "hung_step"

    def strike(self, engine: ToyEngine, amount: float) -> None:
        engine.hang = True

    def end(self, world: World, fault: Fault) -> None:
        engine = world.engines.get(fault.targets[0])
        if engine is not None:
            engine.hang = False


class SlowEngine(_OneEngine):
    """Every step takes many times as long."""

    name = "slow_engine"

    def amount(self, random: Random) -> float:
        return 1.5 + 30 * random.random() ** 3

    def strike(self, engine: ToyEngine, amount: float) -> None:
        engine.speed = amount

    def end(self, world: World, fault: Fault) -> None:
        engine = world.engines.get(fault.targets[0])
        if engine is not None:
            engine.speed = 1.0


class DeadRank(_OneEngine):
    """A rank of a group dies, and sometimes another one while the group forms anew."""

    name = "dead_rank"
    roles = ("prefill", "decode")
    longest = 40.0

    def amount(self, random: Random) -> float:
        return float(random.choice((1, 1, 1, 2)))

    def begin(self, world: World, fault: Fault) -> None:
        for n in range(int(fault.amount)):
            world.queue.after(0.7 * n, world.kill_rank, fault.targets[0])

    def end(self, world: World, fault: Fault) -> None:
        """The card was replaced, and the worker begins anew with all of them."""
        world.replace_ranks(fault.targets[0])


class StalledCopy(_OneEngine):
    """Copies of expert weights into one rank do not end: the plan that needs them has to be given up."""

    name = "stalled_copy"
    roles = ("decode",)
    weight = 0.7

    def strike(self, engine: ToyEngine, amount: float) -> None:
        group = getattr(engine, "group", None)
        if group is not None and group.ranks:
            group.deaf.add(min(group.ranks))

    def end(self, world: World, fault: Fault) -> None:
        group = getattr(world.engines.get(fault.targets[0]), "group", None)
        if group is not None:
            group.deaf.clear()


class TooFewRanks(DeadRank):
    """So many ranks die that the others cannot hold all experts: the group cannot form."""

    name = "wrong_size_ep"
    weight = 0.4
    longest = 20.0

    def amount(self, random: Random) -> float:
        return 16.0  # all that there are, one after the other

    def begin(self, world: World, fault: Fault) -> None:
        for n in range(int(fault.amount)):
            world.queue.after(0.05 * n, world.kill_rank, fault.targets[0])
