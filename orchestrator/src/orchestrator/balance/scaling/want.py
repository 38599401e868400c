"""How many units each role wants: prefill by missed tokens, decode by requests in flight, encoders by patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_core.check import require


@dataclass(frozen=True)
class Rate:
    """A moving average of something a second, by the time constant `seconds`."""

    seconds: float
    value: float = 0.0

    def after(self, amount: float, elapsed: float) -> Rate:
        """`amount` came in `elapsed` seconds."""
        require(elapsed > 0, "elapsed", elapsed, "above 0")
        weight = 1 - math.exp(-elapsed / self.seconds)
        return Rate(self.seconds, self.value + weight * (amount / elapsed - self.value))


def prefill_want(missed_rate: float, backlog: float, capacity: float, *, drain: float = 10.0, use: float = 0.7) -> int:
    """Units for `missed_rate` tokens a second and a backlog of tokens that is to be gone in `drain` seconds.

    capacity: missed tokens a second that one unit was measured to compute. use: part of it that is planned with.
    """
    require(capacity > 0, "capacity", capacity, "above 0, tokens a second")
    return math.ceil((missed_rate + backlog / drain) / (capacity * use) - 1e-9)


def decode_want(in_flight: int, held: int, rows: int, pool: int, *, full: float = 0.85) -> int:
    """Units for requests in flight at `rows` each, and for the tokens that they hold in pools of `pool` tokens."""
    require(rows > 0, "rows", rows, "1 or more")
    require(pool > 0, "pool", pool, "1 or more")
    return max(math.ceil(in_flight / rows), math.ceil(held / (pool * full) - 1e-9))


def encoder_want(patch_rate: float, backlog: float, capacity: float, *, drain: float = 5.0, use: float = 0.7) -> int:
    """As for prefill, by patches."""
    return prefill_want(patch_rate, backlog, capacity, drain=drain, use=use)
