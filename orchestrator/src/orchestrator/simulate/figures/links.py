"""Network cards: transfers one after the other at a fixed rate."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kernel_core.check import require


@dataclass
class Link:
    """First in, first out.

    Attributes:
        rate: bytes a second. free: when all that was asked for has passed. busy: seconds of transfers so far.
    """

    rate: float
    free: float = 0.0
    busy: float = 0.0
    _waiting: deque[tuple[float, int]] = field(default_factory=deque)
    _tokens: int = 0

    def __post_init__(self) -> None:
        require(self.rate > 0, "rate", self.rate, "above 0, bytes a second")

    def send(self, now: float, size: float, tokens: int = 0) -> float:
        """When `size` bytes asked for at `now` have passed; `tokens` is what `waiting` counts of them."""
        require(size >= 0, "size", size, "0 or more, bytes")
        seconds = size / self.rate
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        if tokens:
            self._waiting.append((self.free, tokens))
            self._tokens += tokens
        return self.free

    def waiting(self, now: float) -> int:
        """Tokens of transfers that have not passed at `now`."""
        while self._waiting and self._waiting[0][0] <= now:
            self._tokens -= self._waiting.popleft()[1]
        return self._tokens
