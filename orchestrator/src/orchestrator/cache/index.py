"""The index: which blocks are visible, who uses them, and in which order they go. No bytes, no clock, no I/O.

A hit counts as a use of its whole path. Writing that down costs one update, at the path's last block: a block that has
followers cannot go before them, and when its last follower goes it inherits that one's time of use and expiry. So
atime(parent) >= atime(child) holds by construction, and eviction takes last blocks of chains only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from orchestrator.cache.entry import Entry
from orchestrator.cache.leaf_queue import LeafQueue
from orchestrator.cache.retention import Retention, RetentionPolicy


class Publish(Enum):
    """What became of a publication."""

    NEW = "new"
    ALREADY = "already"
    NO_PARENT = "no_parent"


class BlockIndex:
    """Visible blocks by key.

    `root` keys need no parent. Bytes of a block must be durable before `publish` is called for it.
    """

    def __init__(self, policy: RetentionPolicy | None = None) -> None:
        self.policy = policy or RetentionPolicy()
        self.used = 0
        self.used_by: dict[str, int] = {}
        self._entries: dict[bytes, Entry] = {}
        self._generation = 0
        self._newest: Entry | None = None
        """Published last and in no queue yet: most often its follower comes next, and it is no last block any more."""
        self._lru = LeafQueue(lambda entry: entry.atime)
        self._expiry = LeafQueue(lambda entry: entry.expiry)
        self._tenants = {name: LeafQueue(lambda entry: entry.atime) for name in self.policy.budgets}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    # Looking changes nothing

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Is each key visible?"""
        entries = self._entries
        return [key in entries for key in keys]

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are visible without a gap."""
        entries = self._entries
        for number, key in enumerate(keys):
            if key not in entries:
                return number
        return len(keys)

    # Changes

    def publish(
        self,
        key: bytes,
        parent: bytes,
        size: int,
        now: float,
        retention: Retention = Retention.AGENT,
        *,
        root: bytes,
        tenant: str = "",
        place: Any = None,
        generation: int | None = None,
        expiry: float | None = None,
    ) -> Publish:
        """Make a block visible. A key that is visible already stays as it is; the caller keeps its own bytes.

        A parent must be visible first. `generation` is what the bytes are sealed with (`next_generation`), `expiry`
        is given when an index is read back from disk.
        """
        if key in self._entries:
            return Publish.ALREADY
        above = self._entries.get(parent)
        if above is None and parent != root:
            return Publish.NO_PARENT
        if generation is None:
            generation = self.next_generation()
        self._generation = max(self._generation, generation)
        owner = above.tenant if above is not None else tenant
        entry = Entry(key, parent, above, size, generation, place, owner)
        entry.atime = now
        entry.expiry = self.policy.expiry(now, retention) if expiry is None else expiry
        self._entries[key] = entry
        self.used += size
        self.used_by[owner] = self.used_by.get(owner, 0) + size
        newest = self._newest
        if newest is not None and newest is not above:
            self._queue(newest)
        self._newest = entry
        return Publish.NEW

    def use(self, keys: Sequence[bytes], now: float, retention: Retention) -> Entry | None:
        """A confirmed use of a path from the first block on: prolongs the stay of its visible part, never shortens.

        Returns the last visible block of the path.
        """
        if not keys:
            return None
        entry = self._entries.get(keys[-1])  # a visible block's whole path is visible
        if entry is None:
            count = self.match(keys)
            if not count:
                return None
            entry = self._entries[keys[count - 1]]
        entry.atime = max(entry.atime, now)
        entry.expiry = max(entry.expiry, self.policy.expiry(now, retention))
        return entry

    def remove(self, key: bytes) -> Entry:
        """Take the last block of a chain out. Raises ValueError for a block that others follow or that is leased."""
        entry = self._entries.get(key)
        if entry is None or not entry.is_leaf or entry.leases:
            raise ValueError(f"key: got {key.hex()[:16]}, allowed is a visible block without followers and leases")
        self._remove(entry)
        return entry

    def drop(self, key: bytes) -> list[Entry]:
        """Take out a block whose bytes are lost, with all that follow it; the last of each chain comes first."""
        top = self._entries.get(key)
        if top is None:
            return []
        order, waiting = [], [top]
        while waiting:
            entry = waiting.pop()
            order.append(entry)
            waiting += entry.children()
        order.reverse()
        for entry in order:
            self._remove(entry)
        return order

    def next_generation(self) -> int:
        """A number that no visible block has had, for bytes that are about to be written."""
        self._generation += 1
        return self._generation

    # Order of eviction

    def expired(self, now: float) -> Entry | None:
        """The next block to go because its time is over."""
        self._queue_newest()
        return self._expiry.first(limit=now)

    def oldest(self, tenant: str | None = None) -> Entry | None:
        """The next block to go for room: least recently used, of a path the last first. None where all are leased."""
        self._queue_newest()
        return (self._lru if tenant is None else self._tenants[tenant]).first()

    def unleased(self, entry: Entry) -> None:
        """The last lease of a block ended: it may go again."""
        if entry.visible and entry.is_leaf:
            self._queue(entry)

    def _queue_newest(self) -> None:
        if self._newest is not None:
            newest, self._newest = self._newest, None
            self._queue(newest)

    def _queue(self, entry: Entry) -> None:
        self._lru.add(entry)
        self._expiry.add(entry)
        if entry.tenant in self._tenants:
            self._tenants[entry.tenant].add(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        entry.visible = False
        entry.unlink()
        self.used -= entry.size
        self.used_by[entry.tenant] -= entry.size
        above = entry.parent
        if above is not None and above.visible:
            above.atime = max(above.atime, entry.atime)
            above.expiry = max(above.expiry, entry.expiry)
            if above.is_leaf:
                self._queue(above)
