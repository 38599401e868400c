"""Which decode engine takes a request: two dimensions, requests in flight and tokens held (after DualPath).

Short requests go to engines with few but long ones, long requests to engines with little held, so that neither the
number of rows nor the attention of any engine is far above the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from kernel_core.check import require

_SLACK = 1.05  # above the mean, below which an engine counts as low


@dataclass
class DecodeEngine:
    """What placement knows of an engine; counters change with each assignment at once, so there is no herd.

    Attributes:
        requests: unfinished. tokens: that they hold. room: tokens of cache that are free. group: of ranks that step
        together. rows: most requests; 0 is no limit.
    """

    name: str
    requests: int = 0
    tokens: int = 0
    room: int = 0
    group: str = ""
    rows: int = 0

    def has_room(self, need: int) -> bool:
        return need <= self.room and (self.rows == 0 or self.requests < self.rows)

    def take(self, length: int, need: int) -> None:
        self.requests += 1
        self.tokens += length
        self.room -= need


@dataclass(frozen=True)
class Incoming:
    """A request that has been prefilled: `length` tokens held, `need` with what it may grow by."""

    request: str
    length: int
    need: int


def need(length: int, expected_output: float, *, headroom: float = 1.25, drafts: int = 5) -> int:
    """Tokens of cache that a request needs: its own, expected growth, and two steps of drafts in flight."""
    require(length >= 0, "length", length, "0 or more")
    return length + round(expected_output * headroom) + 2 * (1 + drafts)


Choose = Callable[[Sequence[DecodeEngine], Incoming, float], DecodeEngine]


def two_dimensional(engines: Sequence[DecodeEngine], incoming: Incoming, level: float) -> DecodeEngine:
    """Among engines that stay below `level` tokens the one with fewest requests; else the one with fewest tokens."""
    low = [e for e in engines if e.tokens + incoming.length <= level]
    if low:
        return min(low, key=lambda e: (e.requests, e.tokens, e.name))
    return min(engines, key=lambda e: (e.tokens, e.requests, e.name))


def fewest_requests(engines: Sequence[DecodeEngine], incoming: Incoming, level: float) -> DecodeEngine:
    return min(engines, key=lambda e: (e.requests, e.tokens, e.name))


def fewest_tokens(engines: Sequence[DecodeEngine], incoming: Incoming, level: float) -> DecodeEngine:
    return min(engines, key=lambda e: (e.tokens, e.requests, e.name))


class RoundRobin:
    """One engine after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, engines: Sequence[DecodeEngine], incoming: Incoming, level: float) -> DecodeEngine:
        self._next += 1
        return engines[self._next % len(engines)]


class PowerOfTwo:
    """The one with fewer requests of two that are drawn."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, engines: Sequence[DecodeEngine], incoming: Incoming, level: float) -> DecodeEngine:
        return fewest_requests(self._random.sample(list(engines), min(2, len(engines))), incoming, level)


def level(engines: Iterable[DecodeEngine], head: Iterable[Incoming]) -> float:
    """Tokens that an engine may hold and still count as low: a little above the mean once `head` is placed."""
    engines = list(engines)
    held = sum(e.tokens for e in engines) + sum(r.length for r in head)
    return _SLACK * held / len(engines) if engines else 0.0


def choose_group(groups: Mapping[str, Sequence[DecodeEngine]], incoming: Incoming) -> str | None:
    """The group with fewest tokens that has an engine with room; None if none has."""
    open_groups = [g for g, engines in groups.items() if any(e.has_room(incoming.need) for e in engines)]
    return min(open_groups, key=lambda g: (sum(e.tokens for e in groups[g]), g)) if open_groups else None


def place(
    engines: Sequence[DecodeEngine], queue: Sequence[Incoming], choose: Choose = two_dimensional
) -> list[tuple[Incoming, DecodeEngine]]:
    """Place requests from the head of a queue until no engine has room for the next; counters follow.

    The head waits rather than being passed by, or large requests would starve.
    """
    free = sum(e.room for e in engines)
    head: list[Incoming] = []
    for incoming in queue:
        if incoming.need > free:
            break
        free -= incoming.need
        head.append(incoming)
    limit = level(engines, head)
    placed: list[tuple[Incoming, DecodeEngine]] = []
    for incoming in head:
        fitting = [e for e in engines if e.has_room(incoming.need)]
        if not fitting:
            break
        engine = choose(fitting, incoming, limit)
        engine.take(incoming.length, incoming.need)
        placed.append((incoming, engine))
    return placed
