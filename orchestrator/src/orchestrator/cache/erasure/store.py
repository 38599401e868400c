"""The erasure-coded store: stripes of up to 32 blocks of a chain over twelve targets, any ten of which are enough.

A write is visible once eleven shards are durable and its record is; a missing twelfth is repaired later. Records lie in
LMDB on this machine, shards describe themselves well enough to make them anew.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import lmdb

from orchestrator.cache.entry import Entry
from orchestrator.cache.erasure import code, repair, write
from orchestrator.cache.erasure.placement import place
from orchestrator.cache.erasure.shard import STRIPE_BLOCKS
from orchestrator.cache.erasure.stripes import TABLE, StripeRecord, Stripes
from orchestrator.cache.erasure.target_pool import ReadResult, TargetPool
from orchestrator.cache.gc import Collector, FreeBytes, Lost, Tick, Unpublish
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.leases import Leases
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import At, Block, Put, Store, StoreStats, nowhere
from orchestrator.cache.store.lock import FolderLock
from orchestrator.cache.store.records import Record, Records
from orchestrator.cache.store.restore import restore
from orchestrator.cache.store.segments import Place


class ErasureStore(Store):
    """Blocks of one layout over the targets of a pool; one process writes.

    Args:
        folder: for the records.
        capacity: bytes on all targets together, parity included.
        rebuild_after_s: a target that has been dead for so long is written off: its shards are made again elsewhere.
    """

    def __init__(
        self, folder: Path, layout: bytes, pool: TargetPool, capacity: int, policy: RetentionPolicy | None = None, *,
        rebuild_after_s: float = 600.0, index_bytes: int = 1 << 30, at: At = nowhere,
    ) -> None:  # fmt: skip
        place(0, pool.domains)
        self.layout, self.capacity, self.pool, self.rebuild_after_s = layout, capacity, pool, rebuild_after_s
        self.index = BlockIndex(policy)
        self.leases = Leases(self.index)
        self.at = at
        self._collector = Collector(self.index, capacity, self.leases)
        self.lock, self._writing = threading.RLock(), threading.RLock()
        self._folder_lock = FolderLock(folder)
        self.records = Records(folder, index_bytes, at, tables=[TABLE])
        if (other := self.records.fact("layout", layout)) != layout:
            self.records.close()
            self._folder_lock.close()
            raise ValueError(f"layout: got {layout.hex()[:16]}, allowed is {other.hex()[:16]}, which {folder} holds")
        self.stripes = Stripes(self.records.table(TABLE))
        self._misses: Counter[str] = Counter()
        self._used: set[bytes] = set()
        self._unrecorded = dict.fromkeys(restore(self.index, self.records, self._adopt))
        self._moved: deque[tuple[float, Place]] = deque()
        self._unfreed: list[Place] = []
        self._ends: dict[bytes, None] = {}
        self._now = 0.0
        self._closed = False
        known = {name for record in self.stripes for name in record.targets}
        for name, target in pool.by_name.items():
            target.expect(name in known)
        self._settle()

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        with self.lock:
            return self.index.present(keys)

    def match(self, keys: Sequence[bytes]) -> int:
        with self.lock:
            return self.index.match(keys)

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self.lock:
            entries = [self.index.get(key) for key in keys]
            places = [entry.place if entry is not None else None for entry in entries]
        whole: dict[int, bytes | None] = {}
        found: list[bytes | None] = []
        for entry, place_ in zip(entries, places, strict=True):
            if entry is None or place_ is None:
                self._misses["absent"] += 1
                found.append(None)
                continue
            if place_.segment not in whole:
                whole[place_.segment] = self.read_stripe(place_.segment)
            data = whole[place_.segment]
            start = place_.offset * place_.size
            found.append(data[start : start + place_.size] if data is not None else None)
        return found

    def read_stripe(self, number: int) -> bytes | None:
        """All blocks of a stripe, verified; None where fewer than ten shards are to be had now."""
        with self.lock:
            record = self.stripes.get(number)
            if record is None:
                self._misses["absent"] += 1
                return None
            stripe, targets, missing = record.stripe(self.layout), list(record.targets), list(record.missing)
        result = self.pool.read(stripe, targets, missing)
        self._note(number, targets, result)
        if not result.bodies:
            self._misses["lost" if result.lost else "targets"] += 1
            return None
        return code.decode(result.bodies, stripe.size)

    def write(self, blocks: Sequence[Block], now: float) -> list[Put]:
        results: dict[int, Put] = {}
        with self._writing:
            self._now = max(self._now, now)
            for run in write.runs(blocks):
                write.write_run(self, run, results, now)
        return [results[number] for number in range(len(blocks))]

    def use(self, keys: Sequence[bytes], now: float, retention: Retention) -> None:
        with self.lock:
            last = self.index.use(keys, now, retention)
            if last is not None:
                self._used.add(last.key)

    def pin(self, keys: Sequence[bytes], until: float) -> int | None:
        with self.lock:
            return self.leases.take(keys, until)

    def unpin(self, lease: int) -> bool:
        with self.lock:
            return self.leases.give(lease)

    def collect(self, now: float) -> int:
        """Retention, then sealing of short stripes, then repair."""
        with self._writing:
            gone, self._now = 0, max(self._now, now)
            with self.lock:
                used = self.stripes.used
                # Blocks in stripes that are partly free take more than their own bytes.
                self._collector.capacity = max(1, self.capacity * self.index.used // used) if used else self.capacity
                for action in self._collector.step(Tick(), now):
                    gone += self._follow(action)
                while self._moved and self._moved[0][0] <= now:
                    self._unfreed.append(self._moved.popleft()[1])
            self._flush()
            self._settle()
            repair.seal_short(self, list(self._ends))
            self._ends.clear()
            repair.repair(self)
            return gone

    def stats(self) -> StoreStats:
        with self.lock:
            return StoreStats(len(self.index), self.stripes.used, self.capacity, dict(self._misses))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._flush()
        self._settle()
        self.pool.close()
        self.records.close()
        self._folder_lock.close()

    def move(self, entries: Sequence[Entry], record: StripeRecord) -> bool:
        """Let blocks' records point into another stripe that holds them, in order."""
        with self.lock:
            made = [(e.key, _record(e, Place(record.number, n, record.block_bytes))) for n, e in enumerate(entries)]
            try:
                self.records.put(made, [record.change()])
            except lmdb.Error:
                return False
            self.stripes.add(record)
            for number, entry in enumerate(entries):
                self._moved.append((self._now + self.index.policy.grace_s, entry.place))
                entry.place = made[number][1].place
            return True

    def publish(self, record: StripeRecord, blocks: Sequence[Block], now: float) -> Put | None:
        """Make a stored stripe's blocks visible. None where that worked."""
        with self.lock:
            above = self.index.get(blocks[0].parent)
            tenant = above.tenant if above is not None else blocks[0].tenant
            made = [(b.key, Record(b.parent, b.depth, record.generation, Place(record.number, n, record.block_bytes),
                                   now, self.index.policy.expiry(now, b.retention), tenant))
                    for n, b in enumerate(blocks)]  # fmt: skip
            try:
                self.records.put(made, [record.change()])
            except lmdb.Error as error:
                self.pool.delete(dict(enumerate(record.targets)), record.number)
                return Put.FULL if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) else Put.FAILED
            self.stripes.add(record)
            for block, (key, saved) in zip(blocks, made, strict=True):
                self._unrecorded.pop(key, None)
                self.index.publish(key, block.parent, record.block_bytes, now, block.retention, tenant=tenant,
                                   root=b"" if block.depth else block.parent, place=saved.place,
                                   generation=record.generation)  # fmt: skip
            last = blocks[-1]
            if last.depth % STRIPE_BLOCKS == STRIPE_BLOCKS - 1 and len(blocks) < STRIPE_BLOCKS:
                self._ends[last.key] = None
            return None

    def _adopt(self, key: bytes, place_: Place) -> bool:
        return self.stripes.adopt(place_.segment, place_.offset, key)

    def _note(self, number: int, targets: list[str], result: ReadResult) -> None:
        """What a read found out about the stripe's shards."""
        with self.lock:
            record = self.stripes.get(number)
            if record is None or record.targets != targets:
                return
            record.missing = sorted({*record.missing, *result.bad})
            if result.lost or len(record.missing) > code.PARITY:
                for key in record.keys:
                    entry = self.index.get(key)
                    if entry is not None and entry.place.segment == number:
                        for action in self._collector.step(Lost(key), self._now):
                            self._follow(action)

    def _follow(self, action: Unpublish | FreeBytes) -> int:
        if isinstance(action, Unpublish):
            self._used.update(e.parent.key for e in action.entries if e.parent is not None and e.parent.visible)
            self._unrecorded.update(dict.fromkeys(entry.key for entry in action.entries))
            return len(action.entries)
        self._unfreed += [place_ for _, _, place_ in action.places]
        return 0

    def _flush(self) -> None:
        with self.lock:
            entries = [entry for key in self._used if (entry := self.index.get(key)) is not None]
            self._used.clear()
            if entries:
                try:
                    self.records.put([(entry.key, _record(entry, entry.place)) for entry in entries])
                except lmdb.Error:
                    self._used.update(entry.key for entry in entries)

    def _settle(self) -> None:
        """Records first; shards only once no record is left over."""
        with self.lock:
            try:
                if self._unrecorded:
                    self.records.delete(self._unrecorded)
                self._unrecorded.clear()
                for place_ in self._unfreed:
                    self.stripes.free(place_.segment)
                self._unfreed.clear()
                dead = self.stripes.take_dead()
                if dead:
                    self.records.delete([], [record.removal() for record in dead])
            except lmdb.Error:
                return
        for record in dead:
            self.at("shards.delete")
            self.pool.delete(dict(enumerate(record.targets)), record.number)

    def scan(self, now: float | None = None, age_s: float = 3600.0) -> tuple[int, int]:
        """Compare records and shards both ways: missing shards get repaired, old strays removed. Returns how many."""
        return repair.scan(self, time.time() if now is None else now, age_s)


def _record(entry: Entry, place_: Place) -> Record:
    return Record(entry.parent_key, entry.depth, entry.generation, place_, entry.atime, entry.expiry, entry.tenant)
