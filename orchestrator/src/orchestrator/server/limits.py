"""Limits at the door: how many requests are in work, and how many each key may send."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from orchestrator.server.errors import busy


class TokenBucket:
    """Refills evenly up to one minute's worth. Spending may go below zero, as the cost is known afterwards only."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._capacity, self._clock = per_minute / 60.0, max(per_minute, 1.0), clock
        self._level, self._time = self._capacity, clock()

    def wait(self, amount: float = 1.0) -> float:
        """Seconds until `amount` is there; 0 if it is."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._time) * self._rate)
        self._time = now
        return max(0.0, (min(amount, self._capacity) - self._level) / self._rate)

    def spend(self, amount: float) -> None:
        self._level -= amount


class Limits:
    """Admission. `enter` takes a slot or raises; `leave` gives it back with what the request cost.

    Args:
        max_requests: slots.
        requests_per_minute, tokens_per_minute: for each caller; 0 is no limit. Tokens count prompt tokens that
            were not cached and output tokens.
    """

    _CALLERS = 10_000  # buckets kept; the longest idle one is full again anyway

    def __init__(
        self,
        max_requests: int,
        requests_per_minute: float = 0.0,
        tokens_per_minute: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_requests, self.in_flight = max_requests, 0
        self._rates = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()

    def enter(self, caller: str) -> None:
        """Raises ApiError 429 with a Retry-After header."""
        if self.in_flight >= self.max_requests:
            raise busy(f"{self.max_requests} requests are in work already; try again soon", 1.0)
        for kind in self._rates:
            bucket = self._bucket(caller, kind)
            if bucket is not None and (wait := bucket.wait()) > 0:
                raise busy(f"Rate limit of {self._rates[kind]:g} {kind} a minute reached for this key", wait)
        if (bucket := self._bucket(caller, "requests")) is not None:
            bucket.spend(1.0)
        self.in_flight += 1

    def leave(self, caller: str, tokens: int) -> None:
        self.in_flight -= 1
        if (bucket := self._bucket(caller, "tokens")) is not None:
            bucket.spend(tokens)

    def _bucket(self, caller: str, kind: str) -> TokenBucket | None:
        if not self._rates[kind]:
            return None
        key = (caller, kind)
        if key not in self._buckets:
            self._buckets[key] = TokenBucket(self._rates[kind], self._clock)
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._CALLERS:
            self._buckets.popitem(last=False)
        return self._buckets[key]
