"""Leases of readers: what a reader holds does not go, and a reader that died does not hold it for ever."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from orchestrator.cache.index import BlockIndex


class Leases:
    """Leases on paths of an index. Only the last block of a path is marked: no block goes before its followers."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._held: dict[int, tuple[bytes, int, float, str]] = {}
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._held)

    def take(self, keys: Sequence[bytes], until: float, holder: str = "") -> int | None:
        """Hold a path until a time. None where not all of it is visible."""
        if not keys or self._index.match(keys) < len(keys):
            return None
        entry = self._index.get(keys[-1])
        assert entry is not None
        entry.leases += 1
        number = next(self._ids)
        self._held[number] = (entry.key, entry.generation, until, holder)
        return number

    def give(self, number: int) -> bool:
        """End a lease. False where it is over already."""
        held = self._held.pop(number, None)
        if held is None:
            return False
        entry = self._index.get(held[0])
        if entry is not None and entry.generation == held[1]:
            entry.leases -= 1
            if not entry.leases:
                self._index.unleased(entry)
        return True

    def expire(self, now: float) -> int:
        """End all leases whose time is over."""
        return self._end([number for number, held in self._held.items() if held[2] <= now])

    def drop_holder(self, holder: str) -> int:
        """End all leases of a reader that is gone."""
        return self._end([number for number, held in self._held.items() if held[3] == holder])

    def _end(self, numbers: list[int]) -> int:
        for number in numbers:
            self.give(number)
        return len(numbers)
