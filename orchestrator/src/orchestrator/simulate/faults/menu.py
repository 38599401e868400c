"""All kinds of faults by name, and the draw of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from orchestrator.simulate.faults import disks, engines, links, machines, service
from orchestrator.simulate.faults.base import Fault, FaultKind

if TYPE_CHECKING:
    from orchestrator.simulate.world import World

_KINDS: tuple[FaultKind, ...] = (
    machines.Crash(),
    machines.CrashWithoutDisk(),
    machines.CrashAgain(),
    machines.Pause(),
    machines.Slow(),
    machines.ClockDrift(),
    machines.ClockJump(),
    links.Loss(),
    links.Duplicate(),
    links.Reorder(),
    links.Delay(),
    links.SpoiltPayload(),
    links.Partition(),
    links.Isolation(),
    engines.NotANumber(),
    engines.HungStep(),
    engines.SlowEngine(),
    engines.DeadRank(),
    engines.TooFewRanks(),
    engines.StalledCopy(),
    service.Drain(),
    service.LeaseLoss(),
    service.Disconnect(),
    service.ConfigChange(),
    disks.TornWrite(),
    disks.MisdirectedWrite(),
    disks.BitFlip(),
    disks.FullDisk(),
    disks.TargetDown(),
    disks.DiskLost(),
    disks.Rot(),
    disks.StoreDown(),
)

MENU: dict[str, FaultKind] = {kind.name: kind for kind in _KINDS}


def find(name: str) -> FaultKind:
    """Raises ValueError for a name that is not on the menu."""
    if name not in MENU:
        raise ValueError(f"fault: got {name!r}, allowed are {', '.join(MENU)}")
    return MENU[name]


def schedule(
    world: World, random: Random, start: float, end: float, every: float, kinds: Sequence[str] | None = None
) -> list[Fault]:
    """Faults between `start` and `end`, one in `every` seconds on average, in the order of time.

    Faults often come in company: half of the time the next one follows within a second or two, since what a system
    survives one by one it may not survive together.
    """
    chosen = [find(name) for name in kinds] if kinds is not None else list(_KINDS)
    if not chosen:
        return []
    weights, made, now = [kind.weight for kind in chosen], list[Fault](), start
    while True:
        now += random.random() * 1.5 if random.random() < 0.5 else random.expovariate(1 / (2 * every))
        if now >= end:
            return made
        fault = random.choices(chosen, weights)[0].draw(world, random, now)
        if fault is not None:
            made.append(fault)
