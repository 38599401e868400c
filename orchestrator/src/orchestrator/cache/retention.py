"""How long blocks stay: classes, and when use prolongs a stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

DAY = 86_400.0


class Retention(IntEnum):
    """Why a block is kept. A block that serves several classes keeps the longest of their stays."""

    AGENT = 0
    CHAT = 1


@dataclass(frozen=True)
class RetentionPolicy:
    """Lives, watermarks and budgets.

    Attributes:
        ttl: seconds that a use keeps a block, for each class.
        high, low: shares of the capacity: above `high` the collector removes blocks until `low`.
        grace_s: seconds between a key's removal and that of its bytes; longer than any read takes.
        budgets: tenant -> bytes that its blocks may take; tenants that are not named have no bound of their own.
    """

    ttl: dict[Retention, float] = field(
        default_factory=lambda: {Retention.AGENT: 3 * DAY, Retention.CHAT: 7 * DAY},
    )
    high: float = 0.85
    low: float = 0.80
    grace_s: float = 30.0
    budgets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.ttl) != set(Retention):
            raise ValueError(f"ttl: got {sorted(self.ttl)}, allowed is a time for each of {list(Retention)}")
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"low, high: got {self.low}, {self.high}, allowed is 0 < low <= high <= 1")
        if self.grace_s < 0 or min(self.ttl.values()) <= 0:
            raise ValueError("grace_s, ttl: allowed are times of at least 0 and above 0")

    def expiry(self, now: float, retention: Retention) -> float:
        """The time until which a use at `now` keeps a block."""
        return now + self.ttl[retention]
