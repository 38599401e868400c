"""Bookkeeping of the device pool: reference counts, sharing by key, and a fence for blocks that a step still reads."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence


class PoolFull(RuntimeError):
    """Fewer blocks are free or evictable than asked for; nothing was taken."""


class BlockPool:
    """Ids 1 .. size-1 of a device pool; 0 is padding and is never given out.

    A block is free, live (somebody holds it), fenced (given up, but a step or a copy in flight may still touch it) or
    cached (nobody holds it, its key is known). The four always add up to the pool.
    """

    def __init__(self, size: int) -> None:
        if size < 2:
            raise ValueError(f"size: got {size}, allowed are at least 2 (block 0 is padding)")
        self.size = size
        self._free = deque(range(1, size))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fenced: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._step = 0
        self._done = 0

    @property
    def available(self) -> int:
        """Blocks that `take` can give now."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> dict[str, int]:
        """Blocks by state."""
        return {"free": len(self._free), "live": len(self._holders), "fenced": len(self._fenced),
                "cached": len(self._cached)}  # fmt: skip

    def take(self, count: int) -> list[int]:
        """Blocks for new rows, from the free ones, then from cached ones, least recently used first."""
        if count > self.available:
            raise PoolFull(f"{count} blocks wanted, {self.available} are free or cached of {self.size - 1}")
        ids = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._by_key[self._key_of.pop(block)]
            self._holders[block] = 1
            ids.append(block)
        return ids

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the first keys that the pool has without a gap. Holds nothing."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, ids: Sequence[int]) -> int:
        """How many of these blocks are cached: holding them makes so many fewer available."""
        return sum(block in self._cached for block in ids)

    def hold(self, ids: Sequence[int]) -> None:
        """One more holder for each, cached or live ones."""
        for block in ids:
            if block in self._cached:
                del self._cached[block]
                self._holders[block] = 1
            elif block in self._holders:
                self._holders[block] += 1
            elif block in self._fenced and block in self._key_of:
                del self._fenced[block]
                self._holders[block] = 1
            else:
                raise ValueError(f"ids: got block {block}, allowed are live and cached blocks")

    def publish(self, block: int, key: bytes) -> int:
        """Name a full block that a finished step wrote. Returns the block that the key stands for from now on.

        A second block of the same key stays nameless: whoever has it keeps it, later requests share the first.
        """
        if block not in self._holders:
            raise ValueError(f"block: got {block}, allowed are live blocks")
        if self._key_of.get(block, key) != key:
            raise ValueError(f"block: {block} is named already, and a named block is never written again")
        first = self._by_key.setdefault(key, block)
        if first == block:
            self._key_of[block] = key
        return first

    def forget(self, ids: Sequence[int]) -> None:
        """Take the names of blocks away: nobody finds them any more, their holders keep them."""
        for block in ids:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._by_key[key]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def trim(self, cached: int) -> int:
        """Make cached blocks free, least recently used first, until at most `cached` are left. Returns how many.

        Live and fenced blocks stay, and what is left keeps its parents: an end of a chain is always the older one.
        """
        given = max(0, len(self._cached) - max(0, cached))
        for _ in range(given):
            block, _ = self._cached.popitem(last=False)
            del self._by_key[self._key_of.pop(block)]
            self._free.append(block)
        return given

    def release(self, ids: Sequence[int]) -> None:
        """Give a sequence's blocks up, in the order of the sequence: the last of them will be evicted first."""
        for block in ids:
            if self._holders.get(block, 0) < 1:
                raise ValueError(f"ids: block {block} has no holder")
        for block in reversed(ids):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if self._step > self._done:
                    self._fenced[block] = self._step
                else:
                    self._settle(block)

    def launched(self) -> int:
        """A step or a copy was launched that may touch any live block. Returns its number."""
        self._step += 1
        return self._step

    def completed(self, step: int) -> None:
        """All up to this step have ended: blocks fenced by them become free or cached."""
        if not self._done <= step <= self._step:
            raise ValueError(f"step: got {step}, allowed are {self._done} to {self._step}")
        self._done = step
        for block in [b for b, s in self._fenced.items() if s <= step]:
            del self._fenced[block]
            self._settle(block)

    def _settle(self, block: int) -> None:
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._free.append(block)
