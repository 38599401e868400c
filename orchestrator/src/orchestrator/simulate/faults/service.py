"""What operators and clients do at bad times: drains, new settings, lost leases, disconnects."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from orchestrator.simulate.faults.base import Fault, FaultKind
from orchestrator.simulate.faults.engines import WORKERS
from orchestrator.simulate.faults.machines import draw_machine

if TYPE_CHECKING:
    from orchestrator.simulate.world import World


class Drain(FaultKind):
    """A worker is told to leave; when it has gone, another one comes."""

    name = "drain"
    weight = 2.0
    longest = 30.0

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        name = draw_machine(world, random, *WORKERS)
        grace = random.choice((0.0, 0.5, 3.0, 60.0))
        return None if name is None else Fault(self.name, at, self.lasting(random), (name,), grace)

    def begin(self, world: World, fault: Fault) -> None:
        world.drain(fault.targets[0], fault.amount)

    def end(self, world: World, fault: Fault) -> None:
        world.stop_drain(fault.targets[0])


class LeaseLoss(FaultKind):
    """The router hears nothing of a worker that works on: its lease ends, and others are given its requests."""

    name = "lease_loss"
    longest = 15.0

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        name = draw_machine(world, random, *WORKERS)
        return None if name is None else Fault(self.name, at, 4.0 + self.lasting(random), (name,))

    def begin(self, world: World, fault: Fault) -> None:
        world.network.cut(fault.targets[0], world.settings.router)

    def end(self, world: World, fault: Fault) -> None:
        world.network.join(fault.targets[0], world.settings.router)


class Disconnect(FaultKind):
    """Many clients leave in the same moment."""

    name = "disconnect"

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        return Fault(self.name, at, 0.0, (), 0.1 + 0.9 * random.random())

    def begin(self, world: World, fault: Fault) -> None:
        world.clients.leave(fault.amount)


class ConfigChange(FaultKind):
    """A party is restarted with other times and limits, while the others go on with the old ones."""

    name = "config_change"
    longest = 2.0

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        name = draw_machine(world, random)
        return None if name is None else Fault(self.name, at, self.lasting(random), (name,), random.random())

    def begin(self, world: World, fault: Fault) -> None:
        world.change_settings(fault.targets[0], fault.amount)
        world.crash(fault.targets[0])

    def end(self, world: World, fault: Fault) -> None:
        world.restart(fault.targets[0])
