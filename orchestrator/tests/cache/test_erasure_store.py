import random
import signal
import threading
import time
from itertools import combinations
from pathlib import Path

import pytest
from cache_kit import CHAT, LAYOUT, KillAt, chain, chain_keys, in_child, payload
from target_kit import MemoryTarget, targets

from orchestrator.cache.erasure.store import ErasureStore
from orchestrator.cache.erasure.target_pool import TargetPool
from orchestrator.cache.erasure.targets import DirectoryTarget
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import At, Put, nowhere
from orchestrator.cache.store.open import open_store

POLICY = RetentionPolicy(ttl={Retention.AGENT: 100.0, Retention.CHAT: 1000.0}, grace_s=5.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(folder: Path, places: list, capacity: int = 1 << 30, at: At = nowhere, clock: Clock | None = None):
    pool = TargetPool(places, timeout_s=5.0, **({"clock": clock} if clock else {}))
    return ErasureStore(folder / "index", LAYOUT, pool, capacity, POLICY, rebuild_after_s=60.0, at=at)


def right(number: int, blocks: int, shared: int = 0) -> list[bytes]:
    return [payload(key) for key in chain_keys(number, blocks, shared)]


def test_stripes_of_a_chain_survive_any_two_targets(tmp_path: Path) -> None:
    places = targets()
    store = opened(tmp_path, places)
    assert store.write(chain(1, 70), 0.0) == [Put.STORED] * 70
    assert sorted(len(record.keys) for record in store.stripes) == [6, 32, 32]
    rng = random.Random(1)
    for lost in rng.sample(list(combinations(places, 2)), 12):
        for target in places:
            target.dead = target in lost
        assert store.read(chain_keys(1, 70)) == right(1, 70)
    assert store.stats().misses == {}


def test_a_stripe_of_production_size_on_disk(tmp_path: Path) -> None:
    places = [DirectoryTarget(tmp_path / f"t{n:02d}") for n in range(12)]
    store = opened(tmp_path, places)
    blocks = chain(1, 32, size=113_920)
    assert store.write(blocks, 0.0) == [Put.STORED] * 32
    files = [file for place in places for file in place.folder.glob("*/*")]
    assert [file.stat().st_size for file in files] == [90 * 4096] * 12
    for number in (3, 8):
        (tmp_path / f"t{number:02d}" / "fathom-target").unlink()
    assert store.read(chain_keys(1, 32)) == [block.payload for block in blocks]


def test_three_targets_gone_are_misses_and_nothing_is_forgotten(tmp_path: Path) -> None:
    places, clock = targets(), Clock()
    store = opened(tmp_path, places, clock=clock)
    store.write(chain(1, 40), 0.0)
    for target in places[2:5]:
        target.dead = True
    assert store.read(chain_keys(1, 40)) == [None] * 40
    assert store.match(chain_keys(1, 40)) == 40
    for target in places:
        target.dead = False
    clock.now = 11.0  # dead targets are tried again
    assert store.read(chain_keys(1, 40)) == right(1, 40)


def test_a_target_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    places = targets()
    store = ErasureStore(tmp_path / "index", LAYOUT, TargetPool(places, timeout_s=0.3), 1 << 30, POLICY)
    store.write(chain(1, 5), 0.0)
    (record,) = store.stripes
    hung = next(target for target in places if target.name == record.targets[2])
    go_on = threading.Event()
    hung.delay_s = lambda: float(not go_on.wait(60)) and 0.0
    for _ in range(30):  # more than its threads
        assert store.read(chain_keys(1, 5)) == right(1, 5)
    end = time.monotonic() + 20
    while hung.name not in store.pool.dead():
        assert store.read(chain_keys(1, 5)) == right(1, 5) and time.monotonic() < end
    go_on.set()


def test_wrong_and_absent_shards_are_repaired(tmp_path: Path) -> None:
    places = targets()
    store = opened(tmp_path, places)
    store.write(chain(1, 32), 0.0)
    (record,) = store.stripes
    by_name = {target.name: target for target in places}
    first, second = (by_name[record.targets[n]] for n in (0, 4))
    name = next(iter(first.files))
    good = first.files[name], second.files[next(iter(second.files))]
    first.files[name] = good[0][:4500] + bytes([good[0][4500] ^ 1]) + good[0][4501:]
    second.files.clear()
    for _ in range(200):  # ten good ones may come before a bad answer does
        assert store.read(chain_keys(1, 32)) == right(1, 32)
        if record.missing == [0, 4]:
            break
    assert record.missing == [0, 4]
    store.collect(1.0)
    assert record.missing == [] and first.files[name] == good[0] and [*second.files.values()] == [good[1]]


def test_a_stripe_with_three_wrong_shards_is_lost_and_says_so(tmp_path: Path) -> None:
    places = targets()
    store = opened(tmp_path, places)
    store.write(chain(1, 36), 0.0)
    number = next(record.number for record in store.stripes if record.depth == 0)
    for target in places[:3]:
        for name in [n for n in target.files if n.startswith(f"{number:016x}")]:
            target.files[name] = b"garbage"
    assert store.read(chain_keys(1, 32)) == [None] * 32
    assert store.match(chain_keys(1, 36)) == 0 and store.stats().blocks == 0
    assert store.write(chain(1, 36), 1.0) == [Put.STORED] * 36
    assert store.read(chain_keys(1, 36)) == right(1, 36)


def test_a_target_that_stays_dead_is_rebuilt_elsewhere(tmp_path: Path) -> None:
    places, clock = targets(14), Clock()
    store = opened(tmp_path, places, clock=clock)
    for number in range(6):
        store.write(chain(number, 32), 0.0)
    gone = places[0]
    held = len(gone.files)
    gone.dead = True
    for number in range(6):
        assert store.read(chain_keys(number, 32)) == right(number, 32)
    for now in (1.0, 20.0, 40.0, 55.0):  # it is tried again and again, and stays dead
        clock.now = now
        assert store.read(chain_keys(0, 32)) == right(0, 32)
        store.collect(now)
    assert any(gone.name in record.targets for record in store.stripes)
    clock.now = 70.0
    store.collect(70.0)
    assert held > 0 and all(gone.name not in record.targets and not record.missing for record in store.stripes)
    for number, pair in enumerate(combinations(places[1:7], 2)):
        for target in places[1:]:
            target.dead = target in pair
        assert store.read(chain_keys(number % 6, 32)) == right(number % 6, 32)


def test_eleven_shards_and_a_ticket_are_enough_ten_are_not(tmp_path: Path) -> None:
    places = targets()
    store = opened(tmp_path, places)
    places[3].full = True
    assert store.write(chain(1, 3), 0.0) == [Put.STORED] * 3
    (record,) = store.stripes
    assert len(record.missing) == 1
    places[5].full = True
    assert store.write(chain(2, 3), 0.0) == [Put.FULL] * 3
    assert store.match(chain_keys(2, 3)) == 0 and sum(len(t.files) for t in places) == 11
    places[3].full = places[5].full = False
    store.collect(1.0)
    assert record.missing == [] and sum(len(t.files) for t in places) == 12
    store.close()
    store = opened(tmp_path, places)
    assert store.read(chain_keys(1, 3)) == right(1, 3) and not next(iter(store.stripes)).missing


def test_short_stripes_are_joined_once_their_window_is_full(tmp_path: Path) -> None:
    places = targets()
    store = opened(tmp_path, places)
    blocks = chain(1, 40)
    for first in range(0, 40, 5):
        store.write(blocks[first : first + 5], float(first))
    store.collect(50.0)
    assert any(len(record.keys) == 32 for record in store.stripes)
    assert store.read(chain_keys(1, 40)) == right(1, 40)
    store.collect(56.0)
    assert sorted(len(record.keys) for record in store.stripes) == [3, 5, 32]
    assert sum(len(t.files) for t in places) == 36
    store.close()
    assert opened(tmp_path, places).read(chain_keys(1, 40)) == right(1, 40)


def test_retention_frees_shards_after_the_grace(tmp_path: Path) -> None:
    places = targets()
    store = opened(tmp_path, places)
    store.write(chain(1, 33), 0.0)
    store.write(chain(2, 4, retention=CHAT), 0.0)
    assert store.collect(100.0) == 33
    assert store.match(chain_keys(1, 33)) == 0 and sum(len(t.files) for t in places) == 36
    store.collect(105.0)
    assert sum(len(t.files) for t in places) == 12
    assert store.read(chain_keys(2, 4)) == right(2, 4)


def test_a_small_store_lives_on(tmp_path: Path) -> None:
    places = targets()
    store, now, stored = opened(tmp_path, places, capacity=1_200_000), 0.0, 0
    for number in range(60):
        now += 6.0
        stored += store.write(chain(number, 9, retention=CHAT), now).count(Put.STORED)
        store.collect(now)
        assert store.stripes.used <= 1_200_000
        assert store.read(chain_keys(number, 9)) in (right(number, 9), [None] * 9)
    assert stored > 400


def test_orphans_are_found_both_ways(tmp_path: Path) -> None:
    places = targets()
    store = opened(tmp_path, places)
    store.write(chain(1, 3), 0.0)
    (record,) = store.stripes
    by_name = {target.name: target for target in places}
    by_name[record.targets[2]].files.clear()
    places[0].files["00000000000000ff-03"] = b"left by a crash"
    places[0].files["not ours"] = b""
    assert store.scan(now=10.0, age_s=60.0) == (1, 0)
    assert store.scan(now=100.0, age_s=60.0) == (0, 1)
    assert record.missing == [2] and "not ours" in places[0].files
    store.collect(101.0)
    assert record.missing == []


def life(folder: Path, at: At, say) -> None:
    places = [DirectoryTarget(folder / f"t{n:02d}") for n in range(12)]
    store = opened(folder, places, at=at)
    blocks = chain(1, 36, retention=CHAT)
    for first, last in ((0, 20), (20, 36)):
        if set(store.write(blocks[first:last], 0.0)) == {Put.STORED}:
            say(f"have {last}")
    store.write(chain(2, 4), 0.0)
    store.collect(1.0)
    store.collect(101.0)
    store.collect(107.0)


def test_kill_at_every_point(folder: Path) -> None:
    at = KillAt()
    life(folder / "dry", at, lambda line: None)
    assert {"shards.put", "shards.done", "shards.delete", "records.commit", "records.deleted"} <= set(at.names)
    for number in range(1, at.reached + 1):
        place = folder / str(number)
        status, said = in_child(lambda say, n=number, f=place: life(f, KillAt(n), say))
        assert status == -signal.SIGKILL, (number, said)
        count = max((int(line.split()[1]) for line in said), default=0)
        places = [DirectoryTarget(place / f"t{n:02d}") for n in range(12)]
        store = opened(place, places)
        assert store.match(chain_keys(1, 36)) >= count
        found = store.read(chain_keys(1, 36))
        assert found[:count] == right(1, 36)[:count]
        assert all(one in (None, expected) for one, expected in zip(found, right(1, 36), strict=True))
        store.scan(now=1e12, age_s=0.0)
        store.collect(2.0)
        files = sum(1 for target in places for _ in target.names())
        assert files == 12 * len(store.stripes), number
        store.close()


def test_a_mount_that_is_gone_is_dead_and_not_empty(tmp_path: Path) -> None:
    def opened_again() -> ErasureStore:
        return opened(tmp_path, [DirectoryTarget(tmp_path / f"t{n:02d}") for n in range(12)])

    store = opened_again()
    store.write(chain(1, 4), 0.0)
    store.close()
    for number in range(3):  # mount points without their mounts
        (tmp_path / f"t{number:02d}").rename(tmp_path / f"away{number}")
        (tmp_path / f"t{number:02d}").mkdir()
    store = opened_again()
    assert store.read(chain_keys(1, 4)) == [None] * 4 and store.match(chain_keys(1, 4)) == 4
    assert store.write(chain(2, 4), 0.0) == [Put.FAILED] * 4
    assert store.scan(now=1e12, age_s=0.0) == (0, 0)
    assert not any(any((tmp_path / f"t{number:02d}").iterdir()) for number in range(3))
    store.close()
    for number in range(3):
        (tmp_path / f"t{number:02d}").rmdir()
        (tmp_path / f"away{number}").rename(tmp_path / f"t{number:02d}")
    assert opened_again().read(chain_keys(1, 4)) == right(1, 4)


def test_opened_from_a_description(tmp_path: Path) -> None:
    spec = {"kind": "erasure", "folder": str(tmp_path / "index"), "capacity": 1 << 20, "ask": 12,
            "targets": [{"folder": str(tmp_path / f"t{n}"), "domain": f"rack{n // 2}"} for n in range(12)],
            "policy": {"ttl": {"agent": 5, "chat": 9}}}  # fmt: skip
    store = open_store(spec, LAYOUT)
    assert store.write(chain(1, 4), 0.0) == [Put.STORED] * 4
    assert store.read(chain_keys(1, 4)) == right(1, 4)
    with pytest.raises(ValueError, match="policy: got speed, allowed are"):
        open_store({"kind": "embedded", "policy": {"speed": 1}}, LAYOUT)
    with pytest.raises(ValueError, match="targets: got 11 in 11 failure domains"):
        opened(tmp_path / "few", [MemoryTarget(str(n)) for n in range(11)])
