"""One fetch: which blocks have come, and when to stop waiting. A state machine without I/O."""

from __future__ import annotations

from collections.abc import Sequence


class FetchState:
    """Blocks of a path on their way.

    The answer is always the longest run from the first block on that has come. The fetch ends when every block has
    come, when the first one that has not come cannot come any more, or at its deadline.
    """

    def __init__(self, keys: Sequence[bytes], deadline: float) -> None:
        self.keys, self.deadline = list(keys), deadline
        self.slots: list[int | None] = [None] * len(keys)
        self._limit = len(keys)
        self._ready = 0

    @property
    def ready(self) -> int:
        """Blocks from the first on that have come."""
        return self._ready

    @property
    def complete(self) -> bool:
        """Nothing more can be added to the answer."""
        return self._ready >= self._limit

    def arrived(self, number: int, slot: int) -> bool:
        """Block `number` is in a slot. False where it came after a gap that stays: the slot is of no use."""
        if number >= self._limit:
            return False
        self.slots[number] = slot
        while self._ready < self._limit and self.slots[self._ready] is not None:
            self._ready += 1
        return True

    def failed(self, number: int) -> list[int]:
        """Block `number` will not come. Returns the slots after it, which are of no use now."""
        self._limit = min(self._limit, number)
        dropped = [slot for slot in self.slots[self._limit :] if slot is not None]
        self.slots[self._limit :] = [None] * (len(self.slots) - self._limit)
        return dropped

    def cut(self) -> list[int]:
        """The deadline passed. Returns the slots after the first gap."""
        return self.failed(self._ready)
