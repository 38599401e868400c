import errno
import resource
from pathlib import Path

import pytest
from cache_kit import AGENT, CHAT, LAYOUT, chain, chain_keys, in_child, payload

from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import At, Put, nowhere
from orchestrator.cache.store.embedded import EmbeddedStore

POLICY = RetentionPolicy(ttl={Retention.AGENT: 100.0, Retention.CHAT: 1000.0}, grace_s=5.0)


def opened(folder: Path, capacity: int = 1 << 20, at: At = nowhere, **more: int) -> EmbeddedStore:
    return EmbeddedStore(folder, LAYOUT, capacity, POLICY, at=at, segment_bytes=more.pop("segment_bytes", 2000), **more)


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    blocks = chain(1, 9)
    assert store.write(blocks[:5], 1.0) == [Put.STORED] * 5
    assert store.write(blocks, 2.0) == [Put.ALREADY] * 5 + [Put.STORED] * 4
    store.close()
    store = opened(tmp_path)
    keys = chain_keys(1, 9)
    assert store.match([*keys, b"x" * 32]) == 9
    assert store.read(keys) == [payload(key) for key in keys]
    entry = store.index.get(keys[8])
    assert entry is not None and (entry.atime, entry.expiry, entry.depth) == (2.0, 102.0, 8)


def test_a_child_without_its_parent_is_refused(tmp_path: Path) -> None:
    store, blocks = opened(tmp_path), chain(1, 3)
    assert store.write([blocks[0], blocks[2], blocks[1], blocks[1]], 1.0) == [
        Put.STORED, Put.NO_PARENT, Put.STORED, Put.ALREADY]  # fmt: skip
    assert store.match(chain_keys(1, 3)) == 2


def test_uses_are_kept_and_evictions_follow_them_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in (1, 2, 3):
        store.write(chain(number, 3), float(number))
    store.use(chain_keys(1, 3), 50.0, CHAT)
    store.close()
    store = opened(tmp_path)
    assert store.collect(101.0) == 0
    assert store.collect(103.5) == 6
    assert store.match(chain_keys(1, 3)) == 3 and store.match(chain_keys(2, 3)) == 0
    before = store.stats().used
    store.collect(110.0)
    assert store.stats().used < before
    store.close()
    store = opened(tmp_path)
    assert store.match(chain_keys(1, 3)) == 3 and store.stats().blocks == 3
    assert store.collect(1049.0) == 0 and store.collect(1050.0) == 3


def test_a_long_life_in_a_small_store_never_wedges(tmp_path: Path) -> None:
    store, now = opened(tmp_path, capacity=40_000), 0.0
    kept = chain_keys(0, 2)
    store.write(chain(0, 2), 0.0)
    stored = 0
    for number in range(1, 120):
        now += 3.0
        store.use(kept, now, CHAT)
        stored += store.write(chain(number, 6, shared=2), now).count(Put.STORED)
        store.collect(now)
        assert store.stats().used <= 40_000
        assert store.read(kept) == [payload(key) for key in kept]
    assert stored > 400
    assert store.index.used == sum(entry.size for entry in store.index)


def test_a_reader_that_holds_a_lease_still_finds_its_blocks(tmp_path: Path) -> None:
    store, keys = opened(tmp_path), chain_keys(1, 4)
    store.write(chain(1, 4), 0.0)
    held = store.leases.take(keys, until=500.0)
    assert held is not None
    store.collect(200.0)
    store.collect(210.0)
    assert store.read(keys) == [payload(key) for key in keys]
    store.leases.give(held)
    assert store.collect(211.0) == 4


def test_a_slow_reader_gets_its_bytes_within_the_grace_and_a_miss_after(tmp_path: Path) -> None:
    store, keys = opened(tmp_path), chain_keys(1, 1)
    store.write(chain(1, 1), 0.0)
    entry = store.index.get(keys[0])
    store.collect(100.0)
    assert store._read(entry) == payload(keys[0])
    store.write(chain(2, 6), 101.0)
    store.collect(105.1)
    assert store._read(entry) is None


@pytest.mark.parametrize("where", [0, 30, 60, 100, 127, 128, 200, 383])
def test_flipped_bytes_are_a_miss_and_take_their_followers_along(tmp_path: Path, where: int) -> None:
    store, keys = opened(tmp_path), chain_keys(1, 4)
    store.write(chain(1, 4), 0.0)
    entry = store.index.get(keys[1])
    assert entry is not None
    path = store.segments.folder / f"segment-{entry.place.segment:010d}.blocks"
    data = bytearray(path.read_bytes())
    data[entry.place.offset + where] ^= 0x10
    path.write_bytes(data)
    assert store.read(keys) == [payload(keys[0]), None, payload(keys[2]), payload(keys[3])]
    assert store.match(keys) == 1
    assert store.write(chain(1, 4), 1.0) == [Put.ALREADY, *[Put.STORED] * 3]
    assert store.read(keys) == [payload(key) for key in keys]
    store.close()
    assert opened(tmp_path).match(keys) == 4


def test_records_without_bytes_are_dropped_with_their_followers(tmp_path: Path) -> None:
    store = opened(tmp_path, segment_bytes=400)
    for block in chain(1, 5):
        store.write([block], 0.0)
    entry = store.index.get(chain_keys(1, 5)[2])
    assert entry is not None
    path = store.segments.folder / f"segment-{entry.place.segment:010d}.blocks"
    store.close()
    path.unlink()
    store = opened(tmp_path)
    assert store.match(chain_keys(1, 5)) == 2 and store.stats().blocks == 2


@pytest.mark.parametrize("point", ["segment.create", "segment.write", "segment.half", "segment.sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_no_key_behind(tmp_path: Path, point: str, code: int) -> None:
    fail = [False]

    def at(name: str) -> None:
        if fail[0] and name == point:
            raise OSError(code, "injected")

    store = opened(tmp_path, at=at)
    store.write(chain(1, 2), 0.0)
    fail[0] = True
    if point == "segment.create":
        store.segments.rotate()
    expected = Put.FULL if code == errno.ENOSPC else Put.FAILED
    assert store.write(chain(1, 4), 1.0) == [Put.ALREADY] * 2 + [expected] * 2
    assert store.match(chain_keys(1, 4)) == 2
    fail[0] = False
    assert store.write(chain(1, 4), 2.0)[2:] == [Put.STORED] * 2
    store.close()
    store = opened(tmp_path)
    assert store.read(chain_keys(1, 4)) == [payload(key) for key in chain_keys(1, 4)]


def test_a_really_full_disk(tmp_path: Path) -> None:
    def body(say) -> None:
        store = opened(tmp_path, segment_bytes=200_000)
        store.write(chain(1, 3), 0.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # LMDB's file is larger: it fails as well
        say(" ".join(put.value for put in store.write(chain(1, 130, size=1000), 1.0)))
        say(str(store.match(chain_keys(1, 130))))

    status, said = in_child(body)
    assert status == 0 and said == ["already already already" + " full" * 127, "3"]
    store = opened(tmp_path)
    assert store.match(chain_keys(1, 130)) == 3


def test_a_full_index_refuses_and_goes_on(tmp_path: Path) -> None:
    store = opened(tmp_path, index_bytes=64 * 4096)
    results, number = [], 0
    while Put.FULL not in results and number < 500:
        number += 1
        results = store.write(chain(number, 8, size=8), 0.0)
    assert results == [Put.FULL] * 8
    assert store.match(chain_keys(number, 8)) == 0 and store.match(chain_keys(1, 8)) == 8
    assert store.read(chain_keys(1, 8)) == [payload(key, 8) for key in chain_keys(1, 8)]


def test_capacity_is_a_bound_and_says_so(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity=8_000)
    puts = store.write(chain(1, 30), 0.0)
    assert puts == [Put.STORED] * 20 + [Put.FULL] + [Put.NO_PARENT] * 9
    assert store.stats().used <= 8_000


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(RuntimeError, match="is written by another process"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_another_layout_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(ValueError, match=r"layout: got .* allowed is"):
        EmbeddedStore(tmp_path, b"M" * 32, 1 << 20)
    with pytest.raises(ValueError, match="segment_bytes: got 400"):
        opened(tmp_path, capacity=400, segment_bytes=400)


def test_a_tenant_keeps_to_its_budget(tmp_path: Path) -> None:
    policy = RetentionPolicy(budgets={"t": 4 * 384})
    store = EmbeddedStore(tmp_path, LAYOUT, 1 << 20, policy, segment_bytes=2000)
    store.write(chain(1, 6, tenant="t"), 0.0)
    store.write(chain(2, 6, tenant="u", retention=AGENT), 0.0)
    assert store.collect(1.0) == 2
    assert store.match(chain_keys(1, 6)) == 4 and store.match(chain_keys(2, 6)) == 6
