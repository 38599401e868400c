"""The collector: what leaves the store, in which order, and when its bytes may go. A state machine without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.cache.entry import Entry
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.leases import Leases


@dataclass(frozen=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True)
class Lost:
    """A block's bytes turned out to be wrong or gone."""

    key: bytes


@dataclass(frozen=True)
class Unpublish:
    """Remove these records, in this order: no parent before its child."""

    entries: tuple[Entry, ...]
    why: str


@dataclass(frozen=True)
class FreeBytes:
    """No reader can still be at these places: their bytes may go."""

    places: tuple[tuple[bytes, int, Any], ...]
    """Key, generation and place of each."""


Event = Tick | Lost
Action = Unpublish | FreeBytes


class Collector:
    """One collector a store.

    `step` changes the index at once and returns what has to follow on disk: records first, bytes after the grace.
    """

    def __init__(self, index: BlockIndex, capacity: int, leases: Leases | None = None, batch: int = 10_000) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity: got {capacity}, allowed are bytes above 0")
        self.index, self.capacity, self.leases, self.batch = index, capacity, leases, batch
        self._graves: deque[tuple[float, Entry]] = deque()

    @property
    def waiting(self) -> int:
        """Bytes that are out of sight and not yet freed."""
        return sum(entry.size for _, entry in self._graves)

    def step(self, event: Event, now: float) -> list[Action]:
        actions: list[Action] = []
        if isinstance(event, Lost):
            self._bury(self.index.drop(event.key), now, "lost", actions)
            return actions
        if self.leases is not None:
            self.leases.expire(now)
        self._bury(list(self._removed(self._expired(now))), now, "expired", actions)
        self._bury(list(self._removed(self._over_budget())), now, "budget", actions)
        self._bury(list(self._removed(self._over_watermark())), now, "capacity", actions)
        free = []
        while self._graves and self._graves[0][0] <= now:
            entry = self._graves.popleft()[1]
            free.append((entry.key, entry.generation, entry.place))
        if free:
            actions.append(FreeBytes(tuple(free)))
        return actions

    def _removed(self, victims: Iterable[Entry]) -> Iterator[Entry]:
        for number, entry in enumerate(victims):
            self.index.remove(entry.key)
            yield entry
            if number + 1 == self.batch:
                return

    def _expired(self, now: float) -> Iterator[Entry]:
        while (entry := self.index.expired(now)) is not None:
            yield entry

    def _over_budget(self) -> Iterator[Entry]:
        for tenant, budget in self.index.policy.budgets.items():
            while self.index.used_by.get(tenant, 0) > budget and (entry := self.index.oldest(tenant)) is not None:
                yield entry

    def _over_watermark(self) -> Iterator[Entry]:
        policy = self.index.policy
        if self.index.used <= policy.high * self.capacity:
            return
        while self.index.used > policy.low * self.capacity and (entry := self.index.oldest()) is not None:
            yield entry

    def _bury(self, entries: list[Entry], now: float, why: str, actions: list[Action]) -> None:
        if entries:
            self._graves += [(now + self.index.policy.grace_s, entry) for entry in entries]
            actions.append(Unpublish(tuple(entries), why))


def orphans(
    recorded: Iterable[tuple[bytes, int]], found: dict[tuple[bytes, int], float], now: float, age: float
) -> tuple[list[bytes], list[tuple[bytes, int]]]:
    """Compare records with bytes, both ways, as (key, generation).

    Args:
        found: bytes that exist, with the time they were written.
        age: seconds that bytes without a record are left alone: their record may be on its way.

    Returns:
        Keys whose bytes are missing, and bytes to which no record points.
    """
    known = set(recorded)
    missing = [key for key, generation in known if (key, generation) not in found]
    stray = [place for place, written in found.items() if place not in known and now - written >= age]
    return missing, stray
