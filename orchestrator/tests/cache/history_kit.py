"""Random lives of a store behind a client: inserts, hits, evictions, crashes, damage, full disks.

The world knows the only right bytes of every key and which keys were confirmed and not yet let go. After every
operation: what was read is right, what was confirmed and not damaged is there, blocks add up.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from pathlib import Path

from cache_kit import LAYOUT, ROOT, payload

from orchestrator.cache.chain import Chain, ChainScope
from orchestrator.cache.client import CacheClient, Plan
from orchestrator.cache.entry import Entry
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import Put, Store

SIZE = 96
POLICY = RetentionPolicy(ttl={Retention.AGENT: 400.0, Retention.CHAT: 900.0}, grace_s=5.0)


class Crash(BaseException):
    """The process is gone: nothing after this point is executed."""


class Faults:
    """The `At` of a world: counts down to a crash, and fails writes while the disk is full."""

    def __init__(self) -> None:
        self.crash_in: int | None = None
        self.full = False

    def __call__(self, name: str) -> None:
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in <= 0:
                self.crash_in = None
                raise Crash(name)
        if self.full and name in ("segment.write", "segment.half", "segment.sync", "segment.create"):
            raise OSError(errno.ENOSPC, "injected")


class World:
    """Subclasses open the store, break it, and say what may be lost."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.folder, self.now = random.Random(seed), folder, 0.0
        self.faults = Faults()
        self.done: Counter[str] = Counter()
        self.confirmed: set[bytes] = set()
        self.parent: dict[bytes, bytes] = {}
        self.paths: list[list[bytes]] = []
        self.arena = HostArena.create(folder / "arena", LAYOUT, 24, SIZE)
        self.pins: list[int] = []
        self.start()

    # What a kind of store brings

    def open(self) -> Store:
        raise NotImplementedError

    def abandon(self) -> None:
        """Let go of the store as a killed process does, then maybe tear what was not durable."""
        raise NotImplementedError

    def damage(self) -> None:
        """Break something that the store must notice."""
        raise NotImplementedError

    def stored(self, key: bytes) -> None:
        """A key has new bytes."""

    def excused(self, key: bytes) -> bool:
        """May this confirmed key be unreadable now?"""
        raise NotImplementedError

    @property
    def index(self) -> BlockIndex:
        return self.store.index  # type: ignore[attr-defined]

    # The life

    def start(self) -> None:
        self.store = self.open()
        self.client = CacheClient.inline(self.store, self.arena, ChainScope(b"m", LAYOUT))
        self.pins.clear()

    def run(self, operations: int) -> None:
        kinds = {"insert": 26, "fetch": 30, "match": 12, "use": 8, "collect": 8, "wait": 6, "pin": 3, "unpin": 3,
                 "damage": 1, "crash": 1, "restart": 1, "full": 1, "scribble": 2, "vanish": 1}  # fmt: skip
        names, weights = list(kinds), list(kinds.values())
        for _ in range(operations):
            name = self.rng.choices(names, weights)[0]
            try:
                getattr(self, name)()
            except Crash:
                self.after_crash()
                self.done["crashed"] += 1
            self.done[name] += 1
            self.conserved()

    def path(self) -> list[bytes]:
        rng = self.rng
        if not self.paths or rng.random() < 0.1:
            start = rng.choice(self.paths)[: rng.randint(0, 5)] if self.paths and rng.random() < 0.7 else []
            path = start + [rng.randbytes(32) for _ in range(rng.randint(1, 8))]
            for number, key in enumerate(path):
                self.parent.setdefault(key, path[number - 1] if number else ROOT)
            self.paths.append(path)
            del self.paths[:-60]
        return rng.choice(self.paths)

    def plan(self, path: list[bytes]) -> Plan:
        chain = Chain(self.client.root)
        chain.keys = list(path)
        found = self.store.match(path)
        return Plan(chain, found)

    def insert(self) -> None:
        path = self.path()
        plan = self.plan(path)
        first = self.rng.choice([0, plan.blocks, plan.blocks])
        keys = path[first : first + self.rng.randint(1, 5)]
        retention = self.rng.choice(list(Retention))
        puts = self._write(plan, first, keys, retention)
        for key, put in zip(keys, puts, strict=True):
            if put in (Put.STORED, Put.ALREADY):
                self.confirmed.add(key)
            if put is Put.STORED:
                self.stored(key)
            self.done[f"put {put.value}"] += 1

    def _write(self, plan: Plan, first: int, keys: list[bytes], retention: Retention) -> list[Put]:
        self.now += 0.01
        handle = self.client.insert(plan.chain, first, [payload(key, SIZE) for key in keys], retention, self.tenant())
        assert handle.done
        return handle.puts

    def tenant(self) -> str:
        return self.rng.choice(["a", "b"])

    def fetch(self) -> None:
        path = self.path()
        plan = self.plan(path)
        first = self.rng.randint(0, plan.blocks)
        fetch = self.client.fetch(plan, 1.0, first=first)
        assert fetch.done
        for number in range(fetch.blocks):
            found = fetch.payload(number)
            assert found is None or found == payload(path[first + number], SIZE)
            self.done["blocks read"] += found is not None
        if fetch.blocks < plan.blocks - first:
            self.done["cuts"] += 1
            cut = path[first + fetch.blocks]
            table = self.client._link.core.table  # type: ignore[union-attr]
            assert self.excused(cut) or table.available < 8 or self.index.get(cut) is not None
        fetch.release()
        self.forget()

    def match(self) -> None:
        path = self.path()
        seen = [(entry.atime, entry.expiry) for key in path if (entry := self.index.get(key)) is not None]
        count = self.store.match(path)
        assert self.store.present(path)[:count] == [True] * count
        assert seen == [(e.atime, e.expiry) for key in path if (e := self.index.get(key)) is not None]
        for key in path[: next((n for n, k in enumerate(path) if k not in self.confirmed), len(path))]:
            assert self.index.get(key) is not None or self.excused(key), "a confirmed block is gone"

    def use(self) -> None:
        path = self.path()
        before = {key: e.expiry for key in path if (e := self.index.get(key)) is not None}
        self.store.use(path, self.now, self.rng.choice(list(Retention)))
        after = {entry.key: entry.expiry for entry in map(self.index.get, path) if entry is not None}
        assert all(after[key] >= expiry for key, expiry in before.items())

    def collect(self) -> None:
        leased = {entry.key for entry in self.index if entry.leases}
        self.store.collect(self.now)
        assert all(self.index.get(key) is not None or self.excused(key) for key in leased)
        self.forget()

    def wait(self) -> None:
        self.now += self.rng.random() * 40

    def pin(self) -> None:
        path = self.path()
        lease = self.store.pin(path, self.now + 1e6) if len(self.pins) < 5 else None
        if lease is not None:
            self.pins.append(lease)

    def unpin(self) -> None:
        if self.pins:
            self.store.unpin(self.pins.pop())

    def crash(self) -> None:
        self.faults.crash_in = self.rng.randint(1, 12)

    def restart(self) -> None:
        self.faults.crash_in = None
        self.store.close()
        self.start()
        self.check_all()

    def full(self) -> None:
        self.faults.full = not self.faults.full and self.rng.random() < 0.5

    def scribble(self) -> None:
        """A process that has gone mad writes into the host tier."""
        at = self.rng.randrange(4096, len(self.arena.view))
        self.arena.view[at] ^= 1 << self.rng.randrange(8)

    def vanish(self) -> None:
        """The engine dies with slots reserved and blocks pinned; another comes."""
        from orchestrator.cache.io import messages as m

        self.client._ask(m.Reserve(10**9, 3))
        self.client.fetch(self.plan(self.path()), 1.0)
        self.client.close()
        self.client = CacheClient.inline(self.store, self.arena, ChainScope(b"m", LAYOUT))

    def after_crash(self) -> None:
        self.forget()
        self.faults.crash_in, self.faults.full = None, False
        self.abandon()
        self.start()
        self.check_all()

    def forget(self) -> None:
        """What the collector let go of, or damage took along, is no longer promised."""
        self.confirmed = {key for key in self.confirmed if self.index.get(key) is not None}

    def check_all(self) -> None:
        """After a start: every promise is kept."""
        keys = [key for key in self.confirmed if not self.excused(key)]
        assert all(self.index.get(key) is not None for key in keys), "a confirmed block is gone after a start"
        for key in self.rng.sample(keys, min(len(keys), 20)):
            if not self.excused(key):
                assert self.store.read([key]) == [payload(key, SIZE)]
        self.forget()

    def conserved(self) -> None:
        index = self.index
        entries: list[Entry] = list(index) if self.rng.random() < 0.02 else []
        for entry in entries:
            above = entry.parent
            assert above is None or index.get(above.key) is above, "a visible child without its parent"
        assert not entries or index.used == sum(entry.size for entry in entries) == sum(index.used_by.values())
        table = self.client._link.core.table  # type: ignore[union-attr]
        assert sum(table.counts.values()) == self.arena.slots and table.counts["filling"] == 0 and table.pinned == 0
