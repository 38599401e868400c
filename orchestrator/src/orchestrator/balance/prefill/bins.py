"""Prefill bins: engines in groups by the length of the prompts that they take, sized by the last round's demand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kernel_core.check import require
from orchestrator.balance.prefill.cost import PrefillCost

K = 1024
EDGES = (16 * K, 64 * K, 256 * K)
Key = Literal["length", "missed", "cost"]


@dataclass(frozen=True)
class Prompt:
    """What binning sees of a request: `length` tokens, `missed` of them to be computed."""

    length: int
    missed: int


def key_function(key: Key, cost: PrefillCost) -> Callable[[Prompt], float]:
    """The number that EDGES cut. By cost it is the uncached prompt length that takes as long."""
    if key == "length":
        return lambda prompt: float(prompt.length)
    if key == "missed":
        return lambda prompt: float(prompt.missed)
    require(key == "cost", "key", repr(key), "'length', 'missed' or 'cost'")
    return lambda prompt: cost.fitting(cost.prompt(prompt.missed, prompt.length - prompt.missed), 0)


@dataclass(frozen=True)
class BinSettings:
    """Attributes:
    edges: of the bins, ascending; n edges make n + 1 bins.
    smooth: weight of the last round in the moving average of arriving demand.
    drain: seconds in which queued work is to be done.
    moves: engines that may change bins in a round.
    hysteresis: part of an engine by which a bin's share has to differ before one moves.
    wait: seconds of queue in a longer bin from which an idle engine of a shorter one helps.
    """

    edges: tuple[int, ...] = EDGES
    smooth: float = 0.3
    drain: float = 2.0
    moves: int = 4
    hysteresis: float = 0.1
    wait: float = 0.5

    def __post_init__(self) -> None:
        require(all(a < b for a, b in zip(self.edges, self.edges[1:], strict=False)), "edges", self.edges, "ascending")
        require(0 < self.smooth <= 1, "smooth", self.smooth, "above 0, to 1")
        require(self.drain > 0, "drain", self.drain, "above 0")
        require(self.moves > 0, "moves", self.moves, "1 or more")


@dataclass
class PrefillBins:
    """Which bin each engine serves. Nothing that runs is cancelled: an engine's new bin counts from its next pull.

    Attributes:
        engines: engine to bin. arriving: seconds of work a second, by bin, smoothed.
    """

    settings: BinSettings = field(default_factory=BinSettings)
    engines: dict[str, int] = field(default_factory=dict)
    arriving: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arriving = [0.0] * self.count

    @property
    def count(self) -> int:
        return len(self.settings.edges) + 1

    def bin_of(self, key: float) -> int:
        """A key on an edge belongs to the longer bin."""
        return bisect_right(self.settings.edges, key)

    def add(self, engine: str) -> None:
        """A new engine goes where fewest are for the work that arrives."""
        held = self._held()
        self.engines[engine] = max(range(self.count), key=lambda b: (self.arriving[b] / (held[b] + 1), -held[b], -b))

    def remove(self, engine: str) -> None:
        self.engines.pop(engine, None)

    def round(self, arrived: Sequence[float], queued: Sequence[float], seconds: float) -> dict[str, int]:
        """Size the bins anew, and return the engines that moved.

        Args:
            arrived: seconds of predicted work that came in this round, by bin. queued: that waits now, by bin.
            seconds: length of the round.
        """
        smooth = self.settings.smooth
        for b, work in enumerate(arrived):
            self.arriving[b] += smooth * (work / seconds - self.arriving[b])
        demand = [a + q / self.settings.drain for a, q in zip(self.arriving, queued, strict=True)]
        wanted = shares(demand, len(self.engines))
        exact = _exact(demand, len(self.engines))
        held = self._held()
        moved: dict[str, int] = {}
        while len(moved) < self.settings.moves:
            poor = max(range(self.count), key=lambda b: wanted[b] - held[b])
            rich = min(range(self.count), key=lambda b: wanted[b] - held[b])
            if wanted[poor] <= held[poor] or wanted[rich] >= held[rich]:
                break
            starving = held[poor] == 0 and demand[poor] > 0
            if not starving and exact[poor] - held[poor] < 0.5 + self.settings.hysteresis:
                break
            engine = min(e for e, b in self.engines.items() if b == rich and e not in moved)
            self.engines[engine] = moved[engine] = poor
            held[poor] += 1
            held[rich] -= 1
        return moved

    def order(self, engine: str, waiting: Mapping[int, float]) -> list[int]:
        """Bins that an idle engine serves, in order: its own, shorter ones from near to far, then longer ones.

        waiting: seconds that the first request of a bin has waited. A longer bin's work is taken only when it has
        waited long, since one such prompt keeps the engine from its own.
        """
        own = self.engines[engine]
        longer = [b for b in range(own + 1, self.count) if waiting.get(b, 0.0) >= self.settings.wait]
        return [own, *range(own - 1, -1, -1), *longer]

    def _held(self) -> list[int]:
        held = [0] * self.count
        for b in self.engines.values():
            held[b] += 1
        return held


def shares(demand: Sequence[float], engines: int) -> list[int]:
    """Engines by bin in proportion to demand, by largest remainders; one at least for each bin with work, if enough."""
    exact = _exact(demand, engines)
    given = [int(e) for e in exact]
    order = sorted(range(len(demand)), key=lambda b: (int(exact[b]) - exact[b], b))
    for b in order[: engines - sum(given)]:
        given[b] += 1
    for b in sorted(range(len(demand)), key=lambda b: -demand[b]):
        donor = max(range(len(demand)), key=lambda d: given[d])
        if demand[b] > 0 and given[b] == 0 and given[donor] > 1:
            given[donor] -= 1
            given[b] = 1
    return given


def _exact(demand: Sequence[float], engines: int) -> list[float]:
    total = sum(demand)
    if total <= 0:
        return [engines / len(demand)] * len(demand)
    return [engines * d / total for d in demand]
