"""A storage target whose disk does what bad disks do: it tears, misplaces, flips, fills up, and says nothing."""

from __future__ import annotations

from collections import Counter
from random import Random


class DiskFull(OSError):
    """No space is left; nothing was written."""


class Disk:
    """Shards by name.

    Attributes:
        up: whether the target answers. full: whether every write is refused.
        torn, misdirected, flipped: chances that a write silently keeps a part only, lands under another shard's name,
        or has one wrong bit.
        counts: "torn", "misdirected", "flipped", "full".
    """

    def __init__(self, name: str, random: Random) -> None:
        self.name, self.up, self.full = name, True, False
        self.torn = self.misdirected = self.flipped = 0.0
        self.shards: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self._random = random

    def write(self, name: str, data: bytes) -> None:
        """Raises DiskFull, or ConnectionError where the target is down; every other fault is silent."""
        if not self.up:
            raise ConnectionError(f"{self.name} does not answer")
        if self.full:
            self.counts["full"] += 1
            raise DiskFull(f"{self.name} is full")
        if self.torn or self.misdirected or self.flipped:
            name, data = self._spoilt(name, data)
        self.shards[name] = data

    def read(self, name: str) -> bytes | None:
        """The bytes under a name, None where there are none. Raises ConnectionError where the target is down."""
        if not self.up:
            raise ConnectionError(f"{self.name} does not answer")
        return self.shards.get(name)

    def rot(self) -> bool:
        """Flip one bit of one shard at rest; False where the disk is empty."""
        if not self.shards:
            return False
        name = self._random.choice(sorted(self.shards))
        self.shards[name] = _flip(self.shards[name], self._random)
        self.counts["flipped"] += 1
        return True

    def _spoilt(self, name: str, data: bytes) -> tuple[str, bytes]:
        random = self._random
        if random.random() < self.torn:
            self.counts["torn"] += 1
            return name, data[: random.randrange(len(data))]
        if random.random() < self.misdirected and self.shards:
            self.counts["misdirected"] += 1
            return random.choice(sorted(self.shards)), data
        if random.random() < self.flipped:
            self.counts["flipped"] += 1
            return name, _flip(data, random)
        return name, data


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return data
    bit = random.randrange(8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
