"""The simulated store: right bytes or none, whatever its disks do."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.simulate.store import SharedStore, StoredBlock, Unavailable, make_disks

SIZE = 512
ROOT = b"r" * 32
POLICY = RetentionPolicy(ttl={Retention.AGENT: 100.0, Retention.CHAT: 200.0}, grace_s=5.0)


def data(key):
    return Random(key).randbytes(SIZE)


def chain(number, blocks):
    keys = [Random(f"{number}/{n}").randbytes(32) for n in range(blocks)]
    return [StoredBlock(k, p, n, data(k)) for n, (k, p) in enumerate(zip(keys, [ROOT, *keys], strict=False))]


def make(seed=0, count=13, capacity=1 << 30):
    return SharedStore(make_disks(count, Random(seed)), SIZE, capacity, POLICY)


def read(store, blocks, now=1.0, later=1.0):
    keys = [block.key for block in blocks]
    begun = store.begin_read(keys, now + 30, "reader")
    return None if begun is None else store.end_read(keys, *begun, now + later)


def test_what_was_written_is_read():
    store, blocks = make(), chain(0, 40)  # two stripes
    assert store.write(blocks, ROOT, "a", 0.0) == 40
    assert store.match([b.key for b in blocks]) == 40
    assert read(store, blocks) == [b.data for b in blocks]
    assert store.write(blocks[:3], ROOT, "b", 1.0) == 3 and store.counts["already"] == 3
    assert store.match([b"x" * 32]) == 0 and read(store, [*blocks, chain(1, 1)[0]]) is None
    assert len(store.leases) == 0


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["down", "rot", "empty"])
def test_two_shards_may_be_lost(lost, how):
    store, blocks = make(count=12), chain(0, 5)
    store.write(blocks, ROOT, "a", 0.0)
    for disk in list(store.disks.values())[:lost]:
        if how == "down":
            disk.up = False
        elif how == "rot":
            assert disk.rot()
        else:
            disk.shards.clear()
    got = read(store, blocks)
    assert got == ([b.data for b in blocks] if lost <= 2 else [None] * 5)
    if lost > 2:  # bytes that are gone are no longer promised; silent targets may come back
        assert store.match([b.key for b in blocks]) == (5 if how == "down" else 0)


def test_a_stripe_is_visible_only_if_durable():
    store, blocks = make(count=12), chain(0, 2)
    disks = list(store.disks.values())
    disks[3].full = True
    assert store.write(blocks, ROOT, "a", 0.0) == 0  # twelve are to be chosen
    disks[3].full = False
    disks[3].up = False
    assert store.write(blocks, ROOT, "a", 0.0) == 0
    assert store.match([blocks[0].key]) == 0 and not any(d.shards for d in disks)
    disks[3].up = True
    assert store.write(blocks[1:], ROOT, "a", 0.0) == 0, "no child before its parent"
    assert store.write(blocks, ROOT, "a", 0.0) == 2


def test_a_slow_reader_gets_nothing_of_what_went_meanwhile():
    store, blocks = make(), chain(0, 3)
    store.write(blocks, ROOT, "a", 0.0)
    keys = [b.key for b in blocks]
    lease, generations = store.begin_read(keys, 10.0, "slow")
    store.collect(150.0)  # expired, and its lease is over too
    store.collect(160.0)
    assert not any(d.shards for d in store.disks.values())
    store.write(blocks, ROOT, "a", 161.0)  # the same keys, other bytes on the disks
    assert store.end_read(keys, lease, generations, 162.0) == [None] * 3
    assert read(store, blocks, 163.0) == [b.data for b in blocks]


def test_a_lease_keeps_blocks():
    store, blocks = make(), chain(0, 3)
    store.write(blocks, ROOT, "a", 0.0)
    store.begin_read([b.key for b in blocks], 500.0, "reader")
    store.collect(150.0)
    assert store.match([b.key for b in blocks]) == 3


def test_metadata_come_back_from_the_shards():
    store, blocks, others = make(), chain(0, 40), chain(1, 4)
    store.write(blocks, ROOT, "a", 0.0)
    store.write(others, ROOT, "a", 0.0)
    store.up = False
    with pytest.raises(Unavailable):
        store.match([blocks[0].key])
    for disk in list(store.disks.values())[:2]:
        disk.up = False
    store.restart(10.0)
    assert read(store, blocks, 11.0) == [b.data for b in blocks]
    assert read(store, others, 11.0) == [b.data for b in others]


@pytest.mark.parametrize("seed", range(12))
def test_any_history_gives_right_bytes_or_none(seed):
    random = Random(seed)
    store = make(seed, capacity=60 * SIZE)
    chains = [chain(n, random.randint(1, 40)) for n in range(6)]
    disks, now, hits = list(store.disks.values()), 0.0, 0
    for disk in disks[:3]:
        disk.torn, disk.misdirected, disk.flipped = 0.1, 0.1, 0.1
    for _ in range(300):
        now += random.random() * 4
        what, blocks = random.random(), random.choice(chains)
        if what < 0.4:
            store.write(blocks, ROOT, "a", now)
        elif what < 0.8:
            got = read(store, blocks, now) or []
            assert all(found in (None, block.data) for found, block in zip(got, blocks, strict=False))
            hits += sum(found is not None for found in got)
        elif what < 0.9:
            store.collect(now)
            for entry in store.index:
                assert entry.parent is None or store.index.get(entry.parent.key) is entry.parent
        elif what < 0.93:
            random.choice(disks).rot()
        elif what < 0.96:
            random.choice(disks).full ^= True
        elif what < 0.99:
            random.choice(disks).up ^= True
        else:
            store.restart(now)
    assert hits > 20


def test_too_few_disks_are_refused():
    with pytest.raises(ValueError, match="disks"):
        make(count=11)
