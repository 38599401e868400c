"""A fault of a run's schedule, and what a kind of fault has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from orchestrator.simulate.world import World


@dataclass(frozen=True)
class Fault:
    """Attributes:
    kind: name of its `FaultKind`. at: second at which it begins. seconds: until it ends; 0 for one that has no end.
    targets: machines, links as (from, to), or disks, by name. amount: how bad; its kind says what it means.
    """

    kind: str
    at: float
    seconds: float = 0.0
    targets: tuple[str, ...] = ()
    amount: float = 0.0

    def __str__(self) -> str:
        span = f" for {self.seconds:.2f} s" if self.seconds else ""
        amount = f" by {self.amount:.3g}" if self.amount else ""
        return f"{self.kind}({', '.join(self.targets)}){amount}{span}"


class FaultKind(ABC):
    """One kind of the menu. An object without state: what it does to a world is undone by `end` or by healing.

    Attributes:
        name: in schedules and on the command line. weight: how often it is drawn, against the others.
        longest: seconds that it lasts at most.
    """

    name: ClassVar[str]
    weight: ClassVar[float] = 1.0
    longest: ClassVar[float] = 20.0

    @abstractmethod
    def draw(self, world: World, random: Random, at: float) -> Fault | None:
        """A fault of this kind that begins at `at`; None where the world has nothing that could fail so."""

    @abstractmethod
    def begin(self, world: World, fault: Fault) -> None:
        """Make it so."""

    def end(self, world: World, fault: Fault) -> None:  # noqa: B027 - most faults that strike once need no end
        """Repair it; called `fault.seconds` after `begin` where that is above 0, and when the world heals."""

    def lasting(self, random: Random) -> float:
        """Seconds: short ones are common, long ones happen."""
        return 0.05 + (self.longest - 0.05) * random.random() ** 2
