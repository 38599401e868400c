"""Cache blocks that requests share by key: the scheduler's pool when the prefix cache is on."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_core.check import require
from orchestrator.cache.pool import BlockPool
from orchestrator.engine.fence import Fence


class SharedBlocks:
    """`cache.pool.BlockPool` with the interface of `FencedPool`.

    Blocks that nobody holds but whose key is known count as free: the least recently used of them are handed out once
    no nameless one is left, the end of a chain before its beginning.

    Attributes:
        marks: once a step has ended, and more than the first share of the capacity is such blocks, they are given up
            down to the second, so that a burst of requests finds nameless ones. 0 <= low <= high <= 1.
    """

    def __init__(self, size: int, what: str, fence: Fence, marks: tuple[float, float] = (0.95, 0.9)) -> None:
        high, low = marks
        require(0.0 <= low <= high <= 1.0, "marks", f"{high}, {low}", "high and low with 0 <= low <= high <= 1")
        self.what, self.capacity, self.fence, self.marks = what, size - 1, fence, marks
        self.pool = BlockPool(size)
        self._launched = 0

    @property
    def free(self) -> int:
        return self.pool.available

    @property
    def used(self) -> int:
        return self.pool.counts["live"]

    @property
    def fenced(self) -> int:
        return self.pool.counts["fenced"]

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose key is known."""
        return self.pool.counts["cached"]

    def take(self, count: int) -> list[int]:
        return self.pool.take(count)

    def give(self, ids: Sequence[int]) -> None:
        """One holder less for each; `ids` in the order of their sequence."""
        self._follow()
        self.pool.release(ids)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the first keys that are here without a gap. Holds nothing."""
        return self.pool.match(keys)

    def idle(self, ids: Sequence[int]) -> int:
        """How many of these blocks `free` counts: holding them takes so many away."""
        return self.pool.idle(ids)

    def hold(self, ids: Sequence[int]) -> None:
        """One more holder for each."""
        self.pool.hold(ids)

    def publish(self, block: int, key: bytes) -> int:
        """Name a full block that its holder wrote in a step that has ended; returns the block to go on with.

        Where another block has the key already, that one: so whoever holds a named block holds its named parents, and
        no parent can be evicted before its child.
        """
        first = self.pool.publish(block, key)
        if first != block:
            self.pool.hold([first])
            self.give([block])
        return first

    def forget(self, ids: Sequence[int]) -> None:
        """Take the names of blocks away; their holders keep them."""
        self.pool.forget(ids)

    def reclaim(self) -> None:
        """Free what waited for steps that have ended, and keep to the marks."""
        self._follow()
        self.pool.completed(min(self.fence.done, self._launched) if self.fence.kept else self._launched)
        high, low = (int(mark * self.capacity) for mark in self.marks)
        if self.cached > high:
            self.pool.trim(low)

    def _follow(self) -> None:
        """Have the pool know of the steps that were launched and of those that have ended."""
        while self._launched < self.fence.launched:
            self._launched = self.pool.launched()
        if not self.fence.kept:
            self.pool.completed(self._launched)
