"""Faults of the shared store and its disks."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, ClassVar

from orchestrator.simulate.faults.base import Fault, FaultKind

if TYPE_CHECKING:
    from orchestrator.simulate.store import Disk
    from orchestrator.simulate.world import World


class _BadDisks(FaultKind):
    """Up to `most` disks go bad in one way."""

    most: ClassVar[int] = 3

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        disks = sorted(world.store.disks)
        chosen = random.sample(disks, random.randint(1, min(self.most, len(disks))))
        return Fault(self.name, at, self.lasting(random), tuple(chosen), 0.05 + random.random() ** 2)

    def begin(self, world: World, fault: Fault) -> None:
        for name in fault.targets:
            self.spoil(world.store.disks[name], min(1.0, fault.amount))

    def end(self, world: World, fault: Fault) -> None:
        for name in fault.targets:
            self.spoil(world.store.disks[name], 0.0)

    def spoil(self, disk: Disk, amount: float) -> None:
        """Make it as bad as `amount`, a chance; 0 repairs it."""
        raise NotImplementedError


class TornWrite(_BadDisks):
    """Writes keep a part only, and say nothing."""

    name = "torn_write"

    def spoil(self, disk: Disk, amount: float) -> None:
        disk.torn = amount


class MisdirectedWrite(_BadDisks):
    """Writes land on another shard, and say nothing."""

    name = "misdirected_write"

    def spoil(self, disk: Disk, amount: float) -> None:
        disk.misdirected = amount


class BitFlip(_BadDisks):
    """Writes have one wrong bit."""

    name = "bit_flip"

    def spoil(self, disk: Disk, amount: float) -> None:
        disk.flipped = amount


class FullDisk(_BadDisks):
    """Writes are refused for want of space."""

    name = "full_disk"

    def spoil(self, disk: Disk, amount: float) -> None:
        disk.full = amount > 0


class TargetDown(_BadDisks):
    """Storage targets do not answer; their shards are there afterwards."""

    name = "target_down"

    def spoil(self, disk: Disk, amount: float) -> None:
        disk.up = amount == 0


class DiskLost(FaultKind):
    """A storage target comes back with an empty disk."""

    name = "disk_lost"
    weight = 0.5

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        return Fault(self.name, at, 0.0, (random.choice(sorted(world.store.disks)),))

    def begin(self, world: World, fault: Fault) -> None:
        world.store.disks[fault.targets[0]].shards.clear()


class Rot(FaultKind):
    """Bits of shards at rest flip."""

    name = "rot"

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        disks = random.sample(sorted(world.store.disks), random.randint(1, 4))
        return Fault(self.name, at, 0.0, tuple(disks), float(random.randint(1, 5)))

    def begin(self, world: World, fault: Fault) -> None:
        for name in fault.targets:
            for _ in range(int(fault.amount)):
                world.store.disks[name].rot()


class StoreDown(FaultKind):
    """The store's metadata do not answer; in the end they come back, sometimes with nothing but the shards."""

    name = "store_down"

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        return Fault(self.name, at, self.lasting(random), (), float(random.random() < 0.3))

    def begin(self, world: World, fault: Fault) -> None:
        world.store.up = False

    def end(self, world: World, fault: Fault) -> None:
        if fault.amount:
            world.store.restart(world.queue.now)
        world.store.up = True
