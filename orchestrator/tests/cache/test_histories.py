"""100,000 operations of random histories; a seed repeats its history exactly."""

import contextlib
from pathlib import Path

import pytest
from cache_kit import LAYOUT
from history_kit import POLICY, SIZE, World
from target_kit import MemoryTarget, targets

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes
from orchestrator.cache.erasure import shard
from orchestrator.cache.erasure.store import ErasureStore
from orchestrator.cache.erasure.target_pool import TargetPool
from orchestrator.cache.store.base import Store
from orchestrator.cache.store.embedded import EmbeddedStore


class EmbeddedWorld(World):
    """Crashes tear what was not synced; damage flips bytes in segment files."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.damaged: set[bytes] = set()
        super().__init__(folder, seed)

    def open(self) -> Store:
        return EmbeddedStore(self.folder / "store", LAYOUT, 60_000, POLICY, segment_bytes=4_000, at=self.faults)

    def abandon(self) -> None:
        store = self.store
        assert isinstance(store, EmbeddedStore)
        store._records.close()
        store.segments.close()
        store._folder_lock.close()
        for path in (self.folder / "store" / "segments").iterdir():
            durable = store.segments.sizes.get(int(path.name[8:18]), 0)
            data = path.read_bytes()
            if len(data) > durable and self.rng.random() < 0.7:
                left = self.rng.randint(durable, len(data))
                path.write_bytes(data[:durable] + self.rng.randbytes(left - durable))

    def damage(self) -> None:
        entries = list(self.index)
        if not entries:
            return
        entry = self.rng.choice(entries)
        path = self.folder / "store" / "segments" / f"segment-{entry.place.segment:010d}.blocks"
        with path.open("r+b") as file:
            at = entry.place.offset + self.rng.randrange(HEADER_BYTES + SIZE)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << self.rng.randrange(8)]))
        self.damaged.add(entry.key)

    def excused(self, key: bytes) -> bool:
        while key in self.parent:
            if key in self.damaged:
                return True
            key = self.parent[key]
        return False

    def stored(self, key: bytes) -> None:
        self.damaged.discard(key)


class ErasureWorld(World):
    """Up to two of thirteen targets are gone at any time; shards are flipped, at most two a stripe."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.places: list[MemoryTarget] = targets(13)
        super().__init__(folder, seed)

    def open(self) -> Store:
        pool = TargetPool(self.places, retry_s=0.0)
        return ErasureStore(self.folder / "index", LAYOUT, pool, 2_000_000, POLICY, at=self.faults)

    def abandon(self) -> None:
        assert isinstance(self.store, ErasureStore)
        self.store.records.close()
        self.store.pool.close()
        self.store._folder_lock.close()

    def damage(self) -> None:
        for target in self.places:
            target.dead = False
        if self.rng.random() < 0.5:  # two are gone
            for target in self.rng.sample(self.places, 2):
                target.dead = True
            return
        assert isinstance(self.store, ErasureStore)
        self.store.collect(self.now)  # repairs what was broken before, so that it stays within two a stripe
        stripes = [record for record in self.store.stripes if not record.missing]
        if stripes:
            record = self.rng.choice(stripes)
            by_name = {target.name: target for target in self.places}
            number = self.rng.randrange(12)
            files = by_name[record.targets[number]].files
            name = f"{record.number:016x}-{number:02d}"
            data = bytearray(files[name])
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            files[name] = bytes(data)
            self.store.read_stripe(record.number)
        self.forget()

    def excused(self, key: bytes) -> bool:
        """Only while fewer than ten shards of its stripe are to be had."""
        assert isinstance(self.store, ErasureStore)
        entry = self.index.get(key)
        record = self.store.stripes.get(entry.place.segment) if entry is not None else None
        if record is None:
            return False
        by_name, good = {target.name: target for target in self.places}, 0
        for number, name in enumerate(record.targets):
            data = by_name[name].files.get(shard.name(record.number, number), b"")
            with contextlib.suppress(WrongBytes):
                shard.verify(data, record.stripe(LAYOUT), number)
                good += not by_name[name].dead
        return good < 10

    def full(self) -> None:
        for target in self.places:
            target.full = False
        self.rng.choice(self.places).full = self.rng.random() < 0.5


@pytest.mark.parametrize("seed", range(6))
def test_embedded(folder: Path, seed: int) -> None:
    world = EmbeddedWorld(folder, seed)
    world.run(10_000)
    done = world.done
    assert min(done["crashed"], done["damage"], done["put full"], done["cuts"]) > 10, done
    assert done["blocks read"] > 1500 and done["put stored"] > 1000 and done["put already"] > 200, done


@pytest.mark.parametrize("seed", range(4))
def test_erasure_coded(folder: Path, seed: int) -> None:
    world = ErasureWorld(folder, seed)
    world.run(10_000)
    done = world.done
    assert min(done["crashed"], done["damage"], done["full"]) > 20, done
    assert done["blocks read"] > 1500 and done["put stored"] > 1000 and done["put already"] > 200, done
