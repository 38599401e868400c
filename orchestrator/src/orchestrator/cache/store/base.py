"""What every persistent store does. Presence is cheap and renews nothing; a read is verified or a miss."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from orchestrator.cache.chain import KEY_BYTES
from orchestrator.cache.retention import Retention

At = Callable[[str], None]
"""Called with a name before each step of a write; tests stop a process there."""


def nowhere(_point: str) -> None:
    """The `At` of production."""


@dataclass(frozen=True)
class Block:
    """A full block on its way into a store. `parent` is the chain's root key where `depth` is 0."""

    key: bytes
    parent: bytes
    depth: int
    payload: bytes
    retention: Retention = Retention.AGENT
    tenant: str = ""

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent) != KEY_BYTES:
            raise ValueError(f"key, parent: got {len(self.key)}, {len(self.parent)} bytes, allowed are {KEY_BYTES}")
        if self.depth < 0:
            raise ValueError(f"depth: got {self.depth}, allowed are at least 0")


class Put(Enum):
    """What became of a block. Only STORED and ALREADY can be read. REFUSED: there was no room to wait."""

    STORED = "stored"
    ALREADY = "already"
    NO_PARENT = "no_parent"
    FULL = "full"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass
class StoreStats:
    """Counters since the store was opened, and what it holds now."""

    blocks: int = 0
    used: int = 0
    capacity: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    """Reads that gave nothing, by reason: absent, checksum, key, io, ..."""


class Store(abc.ABC):
    """A persistent store of blocks of one layout.

    Calls may come from several threads. `now` is in seconds of one clock that survives restarts (`time.time`).
    """

    layout: bytes

    @abc.abstractmethod
    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys can be read, in one call. Renews nothing."""

    @abc.abstractmethod
    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Payloads, verified; None for a miss, whatever its cause."""

    @abc.abstractmethod
    def write(self, blocks: Sequence[Block], now: float) -> list[Put]:
        """Store blocks, parents before children. A key is visible only once its bytes are durable."""

    @abc.abstractmethod
    def use(self, keys: Sequence[bytes], now: float, retention: Retention) -> None:
        """A confirmed use of a path from its first block on; stays are prolonged, never shortened."""

    @abc.abstractmethod
    def collect(self, now: float) -> int:
        """One turn of the collector. Returns how many blocks went out of sight."""

    @abc.abstractmethod
    def stats(self) -> StoreStats: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Write down what is not yet durable and let go. May be called twice."""

    def pin(self, keys: Sequence[bytes], until: float) -> int | None:
        """Keep a path until a time, whatever the collector wants. None where not all of it is there, or where this
        kind of store cannot hold anything."""
        return None

    def unpin(self, lease: int) -> bool:
        """End a lease of `pin`. False where it is over already."""
        return False

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are present without a gap."""
        found = self.present(keys)
        return found.index(False) if False in found else len(found)
