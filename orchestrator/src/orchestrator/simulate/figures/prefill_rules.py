"""Which prefill engine takes which prompt: the rules that are compared.

A rule either sends a prompt to a rank the moment it comes, or keeps it until an engine asks for work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Protocol

from orchestrator.balance.prefill import BinSettings, PrefillBins, PrefillCost, Prompt, key_function, turn
from orchestrator.balance.prefill.bins import Key
from orchestrator.simulate.figures.jobs import Job


class PrefillRule(Protocol):
    """The router's part of prefill."""

    def put(self, job: Job, now: float) -> tuple[int, int] | None:
        """A prompt has come: the engine and rank that it is sent to, or None if it is kept."""

    def pull(self, engine: int, now: float, own: bool) -> Job | None:
        """The next prompt for an engine that asks; with `own`, only of the kind that this engine is for."""

    def done(self, job: Job, engine: int) -> None:
        """A prompt is through."""

    def waiting(self) -> int:
        """Prompts that are kept."""

    def round(self, now: float, seconds: float) -> None:
        """`seconds` have passed since the last round."""


@dataclass
class Push:
    """Every prompt goes to a rank at once, by what the router counts of ranks.

    Attributes:
        choose: the rank's number, from requests and tokens to compute on each. Numbers run over the engines first, so
            that ties and turns don't fill one engine before the next.
    """

    engines: int
    ranks: int
    choose: Callable[[list[int], list[int]], int]
    _requests: list[int] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._requests = [0] * (self.engines * self.ranks)
        self._tokens = list(self._requests)

    def put(self, job: Job, now: float) -> tuple[int, int] | None:
        chosen = self.choose(self._requests, self._tokens)
        self._requests[chosen] += 1
        self._tokens[chosen] += job.remaining
        self._held[job.number] = job.remaining
        return chosen % self.engines, chosen // self.engines

    def pull(self, engine: int, now: float, own: bool) -> Job | None:
        return None

    def done(self, job: Job, engine: int) -> None:
        place = job.rank * self.engines + engine
        self._requests[place] -= 1
        self._tokens[place] -= self._held.pop(job.number)

    def waiting(self) -> int:
        return 0

    def round(self, now: float, seconds: float) -> None:
        pass


def round_robin() -> Callable[[list[int], list[int]], int]:
    """One rank after the other."""
    numbers = count()
    return lambda requests, tokens: next(numbers) % len(requests)


def power_of_two(random: Random) -> Callable[[list[int], list[int]], int]:
    """The one with fewer requests of two ranks that are drawn."""

    def choose(requests: list[int], tokens: list[int]) -> int:
        drawn = random.sample(range(len(requests)), min(2, len(requests)))
        return min(drawn, key=requests.__getitem__)

    return choose


def fewest(what: int) -> Callable[[list[int], list[int]], int]:
    """The rank with fewest requests (0) or tokens to compute (1)."""
    return lambda *counts: min(range(len(counts[what])), key=counts[what].__getitem__)


@dataclass
class Pull:
    """Prompts wait in bins until an engine asks. One bin without `bins`.

    Attributes:
        key: of a prompt, cut by the bins' edges.
        yields: see `turn`; 0 is first come, first served.
    """

    key: Callable[[Prompt], float]
    bins: PrefillBins | None = None
    yields: float = 0.0
    _queues: list[list[tuple[float, int, Job]]] = field(default_factory=list)
    _arrived: list[float] = field(default_factory=list)
    _ties: count[int] = field(default_factory=count)
    _since: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bins = 1 if self.bins is None else self.bins.count
        self._queues = [[] for _ in range(bins)]
        self._arrived = [0.0] * bins

    @classmethod
    def by(cls, key: Key | None, cost: PrefillCost, engines: int, yields: float = 0.0) -> Pull:
        """Four bins by `key`, over so many engines; None is one queue."""
        if key is None:
            return cls(lambda prompt: 0.0, None, yields)
        bins = PrefillBins(BinSettings())
        for engine in range(engines):
            bins.add(f"{engine:04}")
        return cls(key_function(key, cost), bins, yields)

    def put(self, job: Job, now: float) -> tuple[int, int] | None:
        b = 0 if self.bins is None else self.bins.bin_of(self.key(Prompt(job.length, job.remaining)))
        job.order = turn(now, job.cost, self.yields)
        heapq.heappush(self._queues[b], (job.order, next(self._ties), job))
        self._arrived[b] += job.cost
        self._since[job.number] = now
        return None

    def pull(self, engine: int, now: float, own: bool) -> Job | None:
        if self.bins is None:
            order = [0]
        else:
            waits = {b: now - self._since[q[0][2].number] for b, q in enumerate(self._queues) if q}
            order = self.bins.order(f"{engine:04}", waits)
        for b in order[:1] if own else order:
            if self._queues[b]:
                job = heapq.heappop(self._queues[b])[2]
                del self._since[job.number]
                return job
        return None

    def done(self, job: Job, engine: int) -> None:
        pass

    def waiting(self) -> int:
        return sum(map(len, self._queues))

    def round(self, now: float, seconds: float) -> None:
        if self.bins is not None:
            queued = [sum(job.cost for _, _, job in queue) for queue in self._queues]
            self.bins.round(self._arrived, queued, seconds)
        self._arrived = [0.0] * len(self._arrived)
