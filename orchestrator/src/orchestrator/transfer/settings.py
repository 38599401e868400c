"""Sizes and times of transfers. Nothing is allocated beyond a size, and every wait is one of these times."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from orchestrator.transfer.errors import require

NAME_BYTES = 255
HANDOFF_BYTES = 64


@dataclass(frozen=True)
class Limits:
    """Bytes, if not said otherwise.

    Attributes:
        part: of one part. total: of all parts of a handoff. parts: number of parts of a handoff.
        held: of parts that a sender keeps of one handoff; `put` waits beyond. One part is always taken.
        window: of parts that a receiver has and its owner has not taken. One part is always taken.
        handoffs: that a sender keeps at a time. links: connections of a sender at a time.
    """

    part: int = 64 << 20
    total: int = 64 << 30
    parts: int = 1 << 20
    held: int = 128 << 20
    window: int = 64 << 20
    handoffs: int = 1024
    links: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(isinstance(value, int) and value > 0, field.name, value, "a whole number above 0")


@dataclass(frozen=True)
class Times:
    """Seconds.

    Attributes:
        beat: after which a side that has nothing to say says so.
        silence: without a word, or without progress of one message, after which a link is broken.
        lease: without a word over any link after which a side gives the transfer up.
        dial: for one attempt to connect. backoff: between two of them.
        tombstone: for which a sender remembers how a handoff ended.
        tries: how often a part may come broken, one time after the other (a number).
    """

    beat: float = 0.5
    silence: float = 2.0
    lease: float = 5.0
    dial: float = 1.0
    backoff: float = 0.05
    tombstone: float = 60.0
    tries: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(value > 0 and math.isfinite(value), field.name, value, "above 0 and finite")
        require(self.silence > 2 * self.beat, "silence", self.silence, f"above two beats ({2 * self.beat})")
        require(self.lease > self.silence, "lease", self.lease, f"above silence ({self.silence})")


def check_handoff(handoff: bytes, epoch: int) -> None:
    """Raise ValueError for what cannot name a handoff."""
    require(isinstance(handoff, bytes), "handoff", type(handoff).__name__, "bytes")
    require(1 <= len(handoff) <= HANDOFF_BYTES, "handoff", f"{len(handoff)} bytes", f"1 to {HANDOFF_BYTES}")
    require(isinstance(epoch, int) and 0 <= epoch < 1 << 63, "epoch", epoch, "0 to 2**63 - 1")


def short(why: str) -> str:
    """Somebody's words, so that they fit into a message."""
    return why[:500].encode(errors="replace").decode()


def check_timeout(timeout: float) -> None:
    require(timeout >= 0 and math.isfinite(timeout), "timeout", timeout, "0 or more seconds, finite")
