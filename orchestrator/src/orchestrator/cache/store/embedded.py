"""The embedded store: LMDB records and append-only segment files in one folder. No server.

Order of a write: bytes, fdatasync, record transaction. Order of a removal: record transaction, grace, bytes. So a
record never points at bytes that a crash can take away; a crash leaves at worst bytes without a record.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import lmdb

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes, seal, verify
from orchestrator.cache.entry import Entry
from orchestrator.cache.gc import Collector, FreeBytes, Lost, Tick, Unpublish
from orchestrator.cache.index import BlockIndex, Publish
from orchestrator.cache.leases import Leases
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store import compact
from orchestrator.cache.store.base import At, Block, Put, Store, StoreStats, nowhere
from orchestrator.cache.store.lock import FolderLock
from orchestrator.cache.store.records import Record, Records
from orchestrator.cache.store.restore import restore
from orchestrator.cache.store.segments import Place, Segments


class EmbeddedStore(Store):
    """Blocks of one layout in a folder that one process writes.

    Args:
        folder: made if it is not there. Raises ValueError where it holds blocks of another layout,
            RuntimeError where another process writes it.
        layout: `BlockLayout.tag`.
        capacity: bytes of segment files; writes beyond are refused with `Put.FULL`.
        segment_bytes: size at which the next segment file is begun, at most a quarter of the capacity.
    """

    def __init__(
        self,
        folder: Path,
        layout: bytes,
        capacity: int,
        policy: RetentionPolicy | None = None,
        *,
        segment_bytes: int | None = None,
        index_bytes: int = 1 << 30,
        at: At = nowhere,
    ) -> None:
        size = segment_bytes or min(1 << 30, capacity // 16)
        if not 0 < size <= capacity // 4:
            raise ValueError(f"segment_bytes: got {size}, allowed are 1 to a quarter of the capacity, {capacity // 4}")
        self.layout, self.capacity = layout, capacity
        self.index = BlockIndex(policy)
        self.leases = Leases(self.index)
        self._collector = Collector(self.index, capacity, self.leases)
        self._lock = threading.RLock()
        self._folder_lock = FolderLock(folder)
        self._closed = False
        self._records = Records(folder / "records", index_bytes, at)
        if (other := self._records.fact("layout", layout)) != layout:
            self._records.close()
            self._closed = True
            self._folder_lock.close()
            raise ValueError(f"layout: got {layout.hex()[:16]}, allowed is {other.hex()[:16]}, which {folder} holds")
        self.segments = Segments(folder / "segments", size, at)
        self._misses: Counter[str] = Counter()
        self._used: set[bytes] = set()
        self._unrecorded: dict[bytes, None] = {}
        self._unfreed: list[Place] = []
        self._moved: deque[tuple[float, Place]] = deque()
        self._now = 0.0
        for key in restore(self.index, self._records, lambda _, place: self.segments.adopt(place)):
            self._unrecorded[key] = None
        self._settle()

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return self.index.present(keys)

    def match(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self.index.match(keys)

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            entries = [self.index.get(key) for key in keys]
        return [self._read(entry) for entry in entries]

    def write(self, blocks: Sequence[Block], now: float) -> list[Put]:
        with self._lock:
            self._now = max(self._now, now)
            return self._write(blocks, now)

    def use(self, keys: Sequence[bytes], now: float, retention: Retention) -> None:
        with self._lock:
            last = self.index.use(keys, now, retention)
            if last is not None:
                self._used.add(last.key)

    def pin(self, keys: Sequence[bytes], until: float) -> int | None:
        with self._lock:
            return self.leases.take(keys, until)

    def unpin(self, lease: int) -> bool:
        with self._lock:
            return self.leases.give(lease)

    def collect(self, now: float) -> int:
        with self._lock:
            gone, self._now = 0, max(self._now, now)
            for action in self._collector.step(Tick(), now):
                gone += self._follow(action)
            self.flush()
            while self._moved and self._moved[0][0] <= self._now:
                self._unfreed.append(self._moved.popleft()[1])
            self._settle()
            compact.compact(self)
            return gone

    def flush(self) -> None:
        """Make uses durable; a crash forgets those since the last call."""
        with self._lock:
            entries = [entry for key in self._used if (entry := self.index.get(key)) is not None]
            self._used.clear()
            if entries:
                self._put(entries)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(len(self.index), self.segments.used, self.capacity, dict(self._misses))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self.flush()
            self._settle()
            self.segments.close()
            self._records.close()
            self._closed = True
            self._folder_lock.close()

    def _write(self, blocks: Sequence[Block], now: float) -> list[Put]:
        results: list[Put] = []
        fresh: list[tuple[Block, int, bytes]] = []
        coming: set[bytes] = set()
        room = self.capacity - self.segments.used
        for block in blocks:
            size = HEADER_BYTES + len(block.payload)
            if block.key in coming or self.index.get(block.key) is not None:
                results.append(Put.ALREADY)
            elif block.depth and block.parent not in coming and self.index.get(block.parent) is None:
                results.append(Put.NO_PARENT)
            elif size > room:
                results.append(Put.FULL)
            else:
                room -= size
                generation = self.index.next_generation()
                header = seal(self.layout, block.key, block.parent, block.depth, generation, block.payload)
                fresh.append((block, generation, header))
                coming.add(block.key)
                results.append(Put.STORED)
        failure = self._store(fresh, now)
        if failure is None:
            return results
        return [failure if put is Put.STORED or block.key in coming else put
                for put, block in zip(results, blocks, strict=True)]  # fmt: skip

    def _store(self, fresh: list[tuple[Block, int, bytes]], now: float) -> Put | None:
        try:
            places = self.segments.append([(header, block.payload) for block, _, header in fresh])
        except OSError as error:
            return Put.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else Put.FAILED
        policy = self.index.policy
        made = [(block.key, Record(block.parent, block.depth, generation, place, now,
                                   policy.expiry(now, block.retention), self._owner(block)))
                for (block, generation, _), place in zip(fresh, places, strict=True)]  # fmt: skip
        try:
            if made:
                self._records.put(made)
        except lmdb.Error as error:
            self._unfreed += places
            return Put.FULL if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) else Put.FAILED
        for (block, generation, _), place in zip(fresh, places, strict=True):
            self._unrecorded.pop(block.key, None)
            done = self.index.publish(block.key, block.parent, place.size, now, block.retention, tenant=block.tenant,
                                      root=b"" if block.depth else block.parent, place=place,
                                      generation=generation)  # fmt: skip
            assert done is Publish.NEW
        return None

    def _owner(self, block: Block) -> str:
        above = self.index.get(block.parent)
        return above.tenant if above is not None else block.tenant

    def _read(self, entry: Entry | None) -> bytes | None:
        reason, place = "absent", None
        if entry is not None:
            place = entry.place
            try:
                return verify(self.segments.read(place), self.layout, entry.key, entry.generation)
            except WrongBytes as wrong:
                reason = wrong.reason
            except OSError:
                reason = "io"
        with self._lock:
            self._misses[reason] += 1
            if entry is not None and reason != "io" and entry.place is place:
                self.drop_lost(entry)
                self._settle()
        return None

    def drop_lost(self, entry: Entry) -> None:
        """A block's bytes are wrong: it goes, with what follows it."""
        if self.index.get(entry.key) is entry:
            for action in self._collector.step(Lost(entry.key), self._now):
                self._follow(action)

    def _follow(self, action: Unpublish | FreeBytes) -> int:
        if isinstance(action, Unpublish):
            parents = {entry.parent for entry in action.entries if entry.parent is not None and entry.parent.visible}
            self._used.update(parent.key for parent in parents)
            self._unrecorded.update(dict.fromkeys(entry.key for entry in action.entries))
            return len(action.entries)
        self._unfreed += [place for _, _, place in action.places]
        return 0

    def _settle(self) -> None:
        """Records first; bytes only once no record is left over."""
        if self._unrecorded:
            try:
                self._records.delete(self._unrecorded)
            except lmdb.Error:
                return
            self._unrecorded.clear()
        for place in self._unfreed:
            self.segments.free(place)
        self._unfreed.clear()
        self.segments.remove_dead()

    def move(self, entries: Sequence[Entry], places: Sequence[Place]) -> None:
        """Let records point to copies of the blocks; the old bytes stay for the grace, as some reader may be there."""
        old = [entry.place for entry in entries]
        for entry, place in zip(entries, places, strict=True):
            entry.place = place
        if self._put(entries):
            self._moved += [(self._now + self.index.policy.grace_s, place) for place in old]
            return
        for entry, place in zip(entries, old, strict=True):
            entry.place = place
        self._unfreed += places

    def _put(self, entries: Sequence[Entry]) -> bool:
        records = [
            (e.key, Record(e.parent_key, e.depth, e.generation, e.place, e.atime, e.expiry, e.tenant)) for e in entries
        ]
        try:
            self._records.put(records)
        except lmdb.Error:
            return False
        return True
