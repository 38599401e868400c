"""Faults of links."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from orchestrator.simulate.faults.base import Fault, FaultKind
from orchestrator.simulate.network import LinkQuality

if TYPE_CHECKING:
    from orchestrator.simulate.world import World


def draw_link(world: World, random: Random) -> tuple[str, str]:
    """Two machines, in one direction."""
    source, target = random.sample(sorted(world.machines), 2)
    return source, target


class _BadLinks(FaultKind):
    """All links, or one of them in one direction, get another quality."""

    def quality(self, amount: float) -> LinkQuality:
        raise NotImplementedError

    def amount(self, random: Random) -> float:
        return 0.02 + 0.4 * random.random() ** 2

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        targets = () if random.random() < 0.3 else draw_link(world, random)
        return Fault(self.name, at, self.lasting(random), targets, self.amount(random))

    def begin(self, world: World, fault: Fault) -> None:
        if fault.targets:
            source, target = fault.targets
            world.network.set_quality(source, target, self.quality(fault.amount))
        else:
            world.network.quality = self.quality(fault.amount)

    def end(self, world: World, fault: Fault) -> None:
        if fault.targets:
            source, target = fault.targets
            world.network.set_quality(source, target, None)
        else:
            world.network.quality = world.network.healthy


class Loss(_BadLinks):
    """Messages vanish."""

    name = "loss"

    def quality(self, amount: float) -> LinkQuality:
        return LinkQuality(loss=amount)


class Duplicate(_BadLinks):
    """Messages come twice, the second one maybe much later."""

    name = "duplicate"

    def quality(self, amount: float) -> LinkQuality:
        return LinkQuality(twice=amount, late=amount)


class Reorder(_BadLinks):
    """Messages pass each other by up to a second."""

    name = "reorder"

    def quality(self, amount: float) -> LinkQuality:
        return LinkQuality(jitter=0.01, late=min(1.0, 2 * amount), hold=1.0)


class Delay(_BadLinks):
    """Every message takes long."""

    name = "delay"

    def amount(self, random: Random) -> float:
        return 0.02 + random.random() ** 2 * 2.0

    def quality(self, amount: float) -> LinkQuality:
        return LinkQuality(delay=amount, jitter=amount / 4)


class SpoiltPayload(_BadLinks):
    """Parts of states and embeddings come with wrong bits, or short."""

    name = "spoilt_payload"

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        return Fault(self.name, at, self.lasting(random), (), self.amount(random))

    def quality(self, amount: float) -> LinkQuality:
        return LinkQuality(spoilt=amount)


class Partition(FaultKind):
    """Nothing passes from some machines to some others; the other direction may work."""

    name = "partition"
    weight = 1.5

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        both = random.random() < 0.4
        return Fault(self.name, at, self.lasting(random), draw_link(world, random), 2.0 if both else 1.0)

    def begin(self, world: World, fault: Fault) -> None:
        source, target = fault.targets
        world.network.cut(source, target)
        if fault.amount == 2.0:
            world.network.cut(target, source)

    def end(self, world: World, fault: Fault) -> None:
        source, target = fault.targets
        world.network.join(source, target)
        if fault.amount == 2.0:
            world.network.join(target, source)


class Isolation(FaultKind):
    """One machine is cut off from all others: it hears nobody, or nobody hears it, or both."""

    name = "isolation"

    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        name = random.choice(sorted(world.machines))
        return Fault(self.name, at, self.lasting(random), (name,), float(random.randint(1, 3)))

    def begin(self, world: World, fault: Fault) -> None:
        for source, target in self._links(world, fault):
            world.network.cut(source, target)

    def end(self, world: World, fault: Fault) -> None:
        for source, target in self._links(world, fault):
            world.network.join(source, target)

    def _links(self, world: World, fault: Fault) -> list[tuple[str, str]]:
        (name,), how = fault.targets, int(fault.amount)
        others = [other for other in world.all_machines if other != name]
        deaf = [(other, name) for other in others if how & 1]
        return deaf + [(name, other) for other in others if how & 2]
