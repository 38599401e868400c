"""The virtual clock: a heap of what happens next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

Call = Callable[..., None]


class EventQueue:
    """Events in the order of their virtual time, seconds.

    Events of the same instant run in an order that the seed draws: no core may count on one. The number behind the
    draw makes the order total, so a run depends on nothing but its seed.

    Attributes:
        now: time of the event that is running, or of the last one. done: events that ran.
    """

    def __init__(self, random: Random) -> None:
        self.now, self.done = 0.0, 0
        self._heap: list[tuple[float, float, int, Call, tuple[Any, ...]]] = []
        self._tie = random.random
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float | None:
        """Time of the next event; None where nothing is left."""
        return self._heap[0][0] if self._heap else None

    def at(self, time: float, call: Call, *arguments: Any) -> None:
        """Run `call(*arguments)` at `time`; a time that has passed means now, after what is running."""
        self._number += 1
        heapq.heappush(self._heap, (max(time, self.now), self._tie(), self._number, call, arguments))

    def after(self, delay: float, call: Call, *arguments: Any) -> None:
        """Run `call(*arguments)` in `delay` seconds. Raises ValueError for a negative or undefined delay."""
        if not delay >= 0:
            raise ValueError(f"delay: got {delay}, allowed are seconds of 0 or more")
        self.at(self.now + delay, call, *arguments)

    def step(self) -> bool:
        """Run the next event. False where there is none."""
        if not self._heap:
            return False
        time, _, _, call, arguments = heapq.heappop(self._heap)
        self.now = time
        self.done += 1
        call(*arguments)
        return True
