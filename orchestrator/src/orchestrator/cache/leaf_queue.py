"""The last blocks of chains, by a time that moves only forward."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from orchestrator.cache.entry import Entry


class LeafQueue:
    """Gives the evictable entry with the smallest time.

    Entries stay in the heap under the time of their last queueing; what changed since is found out when an entry
    comes up, so a use costs nothing here.
    """

    def __init__(self, time: Callable[[Entry], float]) -> None:
        self._time = time
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._tie = count()

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (self._time(entry), -entry.depth, next(self._tie), entry))

    def first(self, limit: float | None = None) -> Entry | None:
        """The entry with the smallest time, at most `limit`; leased ones are left out until queued again."""
        heap = self._heap
        while heap:
            time, _, _, entry = heap[0]
            if limit is not None and time > limit:
                return None
            if not entry.visible or not entry.is_leaf or entry.leases:
                heapq.heappop(heap)
                continue
            if self._time(entry) != time:
                heapq.heappop(heap)
                self.add(entry)
                continue
            return entry
        return None
