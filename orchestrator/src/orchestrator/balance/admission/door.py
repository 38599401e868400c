"""Who is let in: what can never run is refused for good, what would come too late is told when to come again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_core.check import require

_LONGEST = 60
"""Seconds that a client is sent away for at most: engines may be back long before today's queue would be done."""


@dataclass(frozen=True)
class Limits:
    """Attributes:
    context: most tokens of prompt and output together.
    pool: tokens of cache of the smallest engine that would have to hold a request whole.
    target: seconds to the first token that are promised.
    patience: multiple of `target` from which a request is refused.
    most_waiting: requests that wait at most, whatever is predicted.
    """

    context: int
    pool: int
    target: float = 2.0
    patience: float = 5.0
    most_waiting: int = 10_000

    def __post_init__(self) -> None:
        for name in ("context", "pool", "most_waiting"):
            require(getattr(self, name) > 0, name, getattr(self, name), "1 or more")
        require(self.target > 0, "target", self.target, "above 0")
        require(self.patience >= 1, "patience", self.patience, "1 or more")


class Never(ValueError):
    """The request can never run; status 400."""


class Overloaded(RuntimeError):
    """Status 429. `retry_after`: whole seconds, 1 to 60."""

    def __init__(self, retry_after: int, why: str) -> None:
        self.retry_after = retry_after
        super().__init__(f"{why}; try again in {retry_after} s")


def check_size(prompt: int, least_output: int, limits: Limits) -> None:
    """Raise `Never` for what no engine could ever hold."""
    most = min(limits.context, limits.pool)
    if prompt + least_output > most:
        name = "context" if limits.context <= limits.pool else "cache of an engine"
        raise Never(
            f"the prompt has {prompt} tokens, with {least_output} of output more than the {most} that the {name} holds"
        )


def check_load(queued: float, capacity: float, fetch: float, own: float, waiting: int, limits: Limits) -> float:
    """Predicted seconds to the first token; raises `Overloaded` where that is too long.

    Args:
        queued: seconds of prefill work before this request. capacity: engines that work on it.
        fetch: seconds to fetch its prefix. own: seconds of its own prefill. waiting: requests before it.
    """
    if capacity <= 0:
        raise Overloaded(30, "no prefill engine is running")
    predicted = queued / capacity + fetch + own
    late = limits.target * limits.patience
    if waiting >= limits.most_waiting:
        raise Overloaded(_whole(queued / capacity), f"{waiting} requests are waiting")
    if predicted - own - fetch > late:  # a long prompt of its own is no overload
        raise Overloaded(_whole(predicted - late), f"the first token would take {predicted:.1f} s")
    return predicted


def _whole(seconds: float) -> int:
    return min(_LONGEST, max(1, math.ceil(seconds)))


class TokenBucket:
    """A rate limit: `rate` a second, `burst` at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        require(rate > 0, "rate", rate, "above 0")
        require(burst > 0, "burst", burst, "above 0")
        self.rate, self.burst, self._level, self._at = rate, burst, burst, now

    def take(self, amount: float, now: float) -> float:
        """0.0 and the amount is taken, or the seconds until it could be, and nothing is.

        What is above `burst` may pass when the bucket is full, and leaves a debt.
        """
        self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
        short = min(amount, self.burst) - self._level
        if short > 0:
            return short / self.rate
        self._level -= amount
        return 0.0
