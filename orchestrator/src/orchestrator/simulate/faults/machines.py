"""Faults of machines: they stop, stall, run slow, and their clocks go wrong."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from orchestrator.simulate.faults.base import Fault, FaultKind

if TYPE_CHECKING:
    from orchestrator.simulate.world import World


def draw_machine(world: World, random: Random, *roles: str) -> str | None:
    """A machine of one of the roles, or of any; of all, workers are drawn more often, since they hold most."""
    if not roles and random.random() < 0.4:
        roles = ("prefill", "decode")
    names = [name for name in sorted(world.machines) if not roles or world.role_of(name) in roles]
    return random.choice(names) if names else None


class _OneMachine(FaultKind):
    """Strikes one machine of the roles that are named, or of any."""

    roles: tuple[str, ...] = ()

    def amount(self, random: Random) -> float:
        return 0.0

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        name = draw_machine(world, random, *self.roles)
        return None if name is None else Fault(self.name, at, self.lasting(random), (name,), self.amount(random))


class Crash(_OneMachine):
    """A process ends; another one takes its place after a while, with the machine's disk and caches as they were."""

    name = "crash"
    weight = 3.0

    def begin(self, world: World, fault: Fault) -> None:
        world.crash(fault.targets[0])

    def end(self, world: World, fault: Fault) -> None:
        world.restart(fault.targets[0])


class CrashWithoutDisk(Crash):
    """A machine is lost and another one of the same name comes, with nothing on it."""

    name = "crash_without_disk"
    weight = 1.0

    def begin(self, world: World, fault: Fault) -> None:
        world.crash(fault.targets[0], lose_disk=True)


class CrashAgain(Crash):
    """A process ends, and again shortly after each start."""

    name = "crash_again"

    def amount(self, random: Random) -> float:
        return float(random.randint(2, 4))

    def begin(self, world: World, fault: Fault) -> None:
        name, times = fault.targets[0], int(fault.amount)
        for n in range(times):
            world.queue.after(fault.seconds * n / times, world.crash, name)
            world.queue.after(fault.seconds * (n + 0.5) / times, world.restart, name)


class Pause(_OneMachine):
    """A process handles nothing for a while, and does not know it: a collector's pause, a stopped virtual machine."""

    name = "pause"
    weight = 2.0
    longest = 10.0

    def begin(self, world: World, fault: Fault) -> None:
        world.machines[fault.targets[0]].pause()

    def end(self, world: World, fault: Fault) -> None:
        if fault.targets[0] in world.machines:
            world.machines[fault.targets[0]].go_on()


class Slow(_OneMachine):
    """A machine takes long for each message."""

    name = "slow"

    def amount(self, random: Random) -> float:
        return 0.005 + 0.25 * random.random() ** 2

    def begin(self, world: World, fault: Fault) -> None:
        world.machines[fault.targets[0]].busy = fault.amount

    def end(self, world: World, fault: Fault) -> None:
        if fault.targets[0] in world.machines:
            world.machines[fault.targets[0]].busy = 0.0


class ClockDrift(_OneMachine):
    """A clock runs fast or slow by up to a fifth."""

    name = "clock_drift"
    longest = 60.0

    def amount(self, random: Random) -> float:
        return 0.8 + 0.4 * random.random()

    def begin(self, world: World, fault: Fault) -> None:
        world.machines[fault.targets[0]].set_clock(rate=fault.amount)

    def end(self, world: World, fault: Fault) -> None:
        if fault.targets[0] in world.machines:
            world.machines[fault.targets[0]].set_clock(rate=1.0)


class ClockJump(_OneMachine):
    """A clock jumps forward."""

    name = "clock_jump"

    def amount(self, random: Random) -> float:
        return random.random() ** 3 * 90.0

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        name = draw_machine(world, random)
        return None if name is None else Fault(self.name, at, 0.0, (name,), self.amount(random))

    def begin(self, world: World, fault: Fault) -> None:
        world.machines[fault.targets[0]].set_clock(jump=fault.amount)
