"""Random lives of a directory store: what it promises is kept, and it evicts what one index in memory would evict."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
from cache_kit import LAYOUT, ROOT, payload
from history_kit import POLICY, SIZE, World

from orchestrator.cache.block_object import HEADER_BYTES
from orchestrator.cache.gc import Collector, Tick, Unpublish
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.leases import Leases
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import Block, Put, Store
from orchestrator.cache.store.directory import DirectoryStore
from orchestrator.cache.store.directory_survey import files

STEPS = {"file.create", "file.half", "file.sync"}


class DirectoryWorld(World):
    """Crashes leave half-written files, damage flips bits in files, a restart drops the leases of the life before."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.damaged: set[bytes] = set()
        super().__init__(folder, seed)

    def open(self) -> Store:
        shutil.rmtree(self.folder / "store" / "leases", ignore_errors=True)
        return DirectoryStore(self.folder / "store", LAYOUT, 30 * (HEADER_BYTES + SIZE), POLICY, at=self.at)

    def at(self, name: str) -> None:
        self.faults(name)
        if self.faults.full and name in STEPS:
            raise OSError(errno.ENOSPC, "injected")

    def abandon(self) -> None:
        assert isinstance(self.store, DirectoryStore)
        self.store._threads.shutdown()

    @property
    def index(self) -> BlockIndex:
        assert isinstance(self.store, DirectoryStore)
        index = self.store._survey()[0]
        self.store._leases.mark(index, self.now)
        return index

    def damage(self) -> None:
        assert isinstance(self.store, DirectoryStore)
        found = sorted(files(self.store._blocks))
        if found:
            path = self.rng.choice(found)
            data, seen = bytearray(path.read_bytes()), path.stat()
            data[self.rng.randrange(HEADER_BYTES + SIZE)] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)
            os.utime(path, (seen.st_atime, seen.st_mtime))
            self.damaged.add(bytes.fromhex(path.name))

    def excused(self, key: bytes) -> bool:
        while key in self.parent:
            if key in self.damaged:
                return True
            key = self.parent[key]
        return False

    def stored(self, key: bytes) -> None:
        self.damaged.discard(key)


@pytest.mark.parametrize("seed", range(2))
def test_a_directory_keeps_its_promises(folder: Path, seed: int) -> None:
    world = DirectoryWorld(folder, seed)
    world.run(700)
    done = world.done
    assert done["blocks read"] > 100 and done["put stored"] > 100 and done["put already"] > 20, done
    assert min(done["crashed"], done["damage"], done["pin"]) > 1, done


@pytest.mark.parametrize("seed", range(3))
def test_machines_evict_like_one_index_in_memory(folder: Path, seed: int) -> None:
    """Three processes write, use, lease and collect; a model with the embedded store's own parts says what is left."""
    rng = random.Random(seed)
    policy = RetentionPolicy(ttl={Retention.AGENT: 60.0, Retention.CHAT: 150.0}, grace_s=0.0,
                             budgets={"a": 12 * (HEADER_BYTES + SIZE)})  # fmt: skip
    capacity = 40 * (HEADER_BYTES + SIZE)
    machines = [DirectoryStore(folder, LAYOUT, capacity, policy) for _ in range(3)]
    index = BlockIndex(policy)
    leases, pins = Leases(index), []
    collector = Collector(index, capacity, leases)
    now, evicted, paths = 0.0, 0, []
    for _ in range(400):
        now += rng.choice([1.0, 1.0, 7.0])
        store, kind = rng.choice(machines), rng.random()
        if not paths or rng.random() < 0.2:
            shared = rng.choice(paths)[: rng.randint(0, 4)] if paths else []
            paths = [*paths[-12:], [*shared, *(rng.randbytes(32) for _ in range(rng.randint(1, 5)))]]
        path, retention = rng.choice(paths), rng.choice(list(Retention))
        if kind < 0.4:
            tenant = rng.choice(["a", "b", ""])
            blocks = [Block(key, path[n - 1] if n else ROOT, n, payload(key, SIZE), retention, tenant)
                      for n, key in enumerate(path)]  # fmt: skip
            for block, put in zip(blocks, store.write(blocks, now), strict=True):
                if put is Put.STORED:
                    size = store._path(block.key).stat().st_size
                    index.publish(block.key, block.parent, size, now, retention, root=b"" if block.depth else ROOT,
                                  tenant=tenant)  # fmt: skip
        elif kind < 0.65:
            store.use(path, now, retention)
            for number in range(1, index.match(path) + 1):  # the store renews the stay of each block
                index.use(path[:number], now, retention)
        elif kind < 0.72 and len(pins) < 4:
            until = now + rng.choice([5.0, 40.0])
            pair = store.pin(path, until), leases.take(path, until)
            assert (pair[0] is None) == (pair[1] is None)
            if pair[0] is not None:
                pins.append((store, *pair))
        elif kind < 0.78 and pins:
            holder, ours, models = pins.pop(rng.randrange(len(pins)))
            holder.unpin(ours), leases.give(models)
        else:
            gone = store.collect(now)
            expected = [entry.key for action in collector.step(Tick(), now) if isinstance(action, Unpublish)
                        for entry in action.entries]  # fmt: skip
            assert gone == len(expected)
            evicted += gone
        known = {key for path in paths for key in path}
        assert all(found == (key in index) for key, found in zip(known, store.present(list(known)), strict=True))
    assert evicted > 40
    for machine in machines:
        machine.close()
