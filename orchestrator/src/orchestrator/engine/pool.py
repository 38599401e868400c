"""Free lists of cache blocks and request slots. Id 0 is padding and is never given out."""

from __future__ import annotations

from collections import deque


class IdPool:
    """Hands out ids 1 .. size-1, oldest freed first. Freeing an id twice is an error, never silent."""

    def __init__(self, size: int, what: str) -> None:
        self.what, self.capacity = what, size - 1
        self._free = deque(range(1, size))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise RuntimeError(
                f"{count} {self.what} wanted, {len(self._free)} are free; the scheduler must check first"
            )
        ids = [self._free.popleft() for _ in range(count)]
        self._taken.update(ids)
        return ids

    def give(self, ids: list[int]) -> None:
        for i in ids:
            if i not in self._taken:
                raise RuntimeError(f"{self.what} {i} was freed twice")
            self._taken.remove(i)
            self._free.append(i)
