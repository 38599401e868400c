import errno
import os
import signal
from pathlib import Path

import pytest
from cache_kit import CHAT, LAYOUT, KillAt, chain, chain_keys, in_child, payload

from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import At, Put, nowhere
from orchestrator.cache.store.directory import DirectoryStore

POLICY = RetentionPolicy(ttl={Retention.AGENT: 100.0, Retention.CHAT: 1000.0}, grace_s=5.0)


def opened(folder: Path, capacity: int = 1 << 20, at: At = nowhere) -> DirectoryStore:
    return DirectoryStore(folder, LAYOUT, capacity, POLICY, at)


def right(number: int, blocks: int) -> list[bytes]:
    return [payload(key) for key in chain_keys(number, blocks)]


def test_two_machines_share_a_directory(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    blocks = chain(1, 6)
    assert two.write(blocks[3:], 0.0) == [Put.NO_PARENT] * 3
    assert one.write(blocks[:4], 0.0) == [Put.STORED] * 4
    assert two.write(blocks, 0.0) == [Put.ALREADY] * 4 + [Put.STORED] * 2
    assert one.match(chain_keys(1, 7)) == 6 and one.read(chain_keys(1, 6)) == right(1, 6)
    assert one.present([b"x" * 32]) == [False] and one.read([b"x" * 32]) == [None]


def test_retention_goes_by_the_files_times(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in (1, 2):
        store.write(chain(number, 3), float(number))
    store.use(chain_keys(1, 3), 50.0, CHAT)
    store.use(chain_keys(1, 3), 60.0, Retention.AGENT)  # does not shorten
    store.match(chain_keys(2, 3))
    store.read(chain_keys(2, 3))  # a read is no use
    other = opened(tmp_path)
    assert other.collect(101.0) == 0 and other.collect(103.0) == 3
    assert other.match(chain_keys(2, 3)) == 0 and other.match(chain_keys(1, 3)) == 3
    assert len(list((tmp_path / "trash").iterdir())) == 3
    other.collect(108.0)
    assert not list((tmp_path / "trash").iterdir())
    assert other.collect(1049.0) == 0 and other.collect(1050.0) == 3


def test_watermarks_hold_in_a_directory(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity=384 * 20)
    for number in range(3):
        store.write(chain(number, 6), float(number))
    assert store.collect(10.0) == 2
    assert [store.match(chain_keys(n, 6)) for n in range(3)] == [4, 6, 6]
    assert store.write(chain(9, 6), 11.0) == [Put.STORED] * 4 + [Put.FULL] + [Put.NO_PARENT]


@pytest.mark.parametrize("where", [3, 60, 127, 200])
def test_flipped_and_foreign_files_are_misses(tmp_path: Path, where: int) -> None:
    store, keys = opened(tmp_path), chain_keys(1, 4)
    store.write(chain(1, 4), 0.0)
    path = store._path(keys[1])
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    assert store.read(keys)[1] is None and store.match(keys) == 1
    store._path(keys[3]).write_bytes(store._path(keys[2]).read_bytes())
    assert store.read([keys[3]]) == [None]
    assert store.collect(1.0) == 1  # the rest of the chain cannot be reached
    assert store.write(chain(1, 4), 2.0) == [Put.ALREADY] + [Put.STORED] * 3
    assert store.read(keys) == right(1, 4)


@pytest.mark.parametrize("point", ["file.create", "file.half", "file.sync", "file.rename"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, point: str) -> None:
    def at(name: str) -> None:
        if name == point:
            raise OSError(errno.ENOSPC, "injected")

    store = opened(tmp_path, at=at)
    assert store.write(chain(1, 1), 0.0) == [Put.FULL]
    assert not [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]


def test_kill_at_every_point(folder: Path) -> None:
    def life(place: Path, at: At, say) -> None:
        store = opened(place, at=at)
        for number in (1, 2):
            store.write(chain(number, 2, retention=CHAT), 0.0)
            say(str(number))
        store.write(chain(3, 2), 0.0)
        store.collect(101.0)

    at = KillAt()
    life(folder / "dry", at, lambda line: None)
    assert set(at.names) == {"file.create", "file.half", "file.sync", "file.rename", "file.renamed", "file.discard"}
    for number in range(1, at.reached + 1):
        place = folder / str(number)
        status, said = in_child(lambda say, n=number, f=place: life(f, KillAt(n), say))
        assert status == -signal.SIGKILL
        store = opened(place)
        for one in said:
            assert store.read(chain_keys(int(one), 2)) == right(int(one), 2)
        for one in (1, 2, 3):
            found = store.read(chain_keys(one, 2))
            assert found in ([None, None], [right(one, 2)[0], None], right(one, 2))
        store.close()


def test_one_collector_at_a_time(tmp_path: Path) -> None:
    import fcntl

    store = opened(tmp_path)
    store.write(chain(1, 1), 0.0)
    with (tmp_path / "collector.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert store.collect(200.0) == 0
    assert store.collect(200.0) == 1


def test_what_was_used_last_goes_last(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity=384 * 20)
    for number in range(3):
        store.write(chain(number, 6), float(number))
    other = opened(tmp_path, capacity=384 * 20)
    other.use(chain_keys(0, 6), 3.0, Retention.AGENT)
    other.use(chain_keys(0, 6), 2.0, CHAT)  # an older use moves nothing back
    for number in (1, 2):
        other.match(chain_keys(number, 6)), other.read(chain_keys(number, 6))  # no use
    assert store.collect(10.0) == 2
    assert [store.match(chain_keys(n, 6)) for n in range(3)] == [6, 4, 6]
    assert store.write(chain(8, 1), 11.0) == [Put.STORED] and opened(tmp_path, 384 * 20).collect(11.0) == 0
    assert opened(tmp_path, capacity=384 * 17).collect(12.0) == 4
    assert [store.match(chain_keys(n, 6)) for n in range(3)] == [6, 0, 6]


def test_a_use_is_inherited_when_its_last_block_goes(tmp_path: Path) -> None:
    """Chain 0 is used after chain 1 was written; turns of the collector take its last blocks one after the other."""
    store = opened(tmp_path, capacity=384 * 100)
    store.write(chain(0, 4), 0.0), store.write(chain(1, 4), 5.0)
    store.use(chain_keys(0, 4), 9.0, CHAT), store.use(chain_keys(1, 2), 8.0, CHAT)
    left = []
    for blocks in (7, 6, 5, 4, 3):
        opened(tmp_path, capacity=int(384 * blocks / 0.8) + 1).collect(10.0)
        left.append([store.match(chain_keys(n, 4)) for n in (0, 1)])
    assert left == [[4, 3], [4, 2], [4, 1], [4, 0], [3, 0]]
    noted = [path for path in (tmp_path / "uses").rglob("*") if path.is_file()]
    assert [path.name for path in noted] == [chain_keys(0, 4)[2].hex()]  # nothing stays of blocks that are gone


def test_budgets_of_tenants(tmp_path: Path) -> None:
    policy = RetentionPolicy(ttl=POLICY.ttl, budgets={"small": 384 * 3 + 100})
    store = DirectoryStore(tmp_path, LAYOUT, 1 << 20, policy)
    store.write(chain(1, 4, tenant="small"), 0.0)
    store.write(chain(2, 3, tenant="small"), 1.0)
    store.write(chain(3, 6, tenant="large"), 0.0)
    store.write(chain(4, 6), 0.0)
    assert opened(tmp_path).collect(2.0) == 0  # another's policy names no budget
    assert DirectoryStore(tmp_path, LAYOUT, 1 << 20, policy).collect(2.0) == 4
    assert [store.match(chain_keys(n, 6)) for n in (1, 2, 3, 4)] == [0, 3, 6, 6]
    assert store.read(chain_keys(2, 3)) == right(2, 3)
    assert store.write(chain(5, 1, tenant="x" * 1025), 3.0) == [Put.FAILED]


def test_an_owner_that_is_damaged_owns_nothing(tmp_path: Path) -> None:
    policy = RetentionPolicy(ttl=POLICY.ttl, budgets={"t": 1})
    store = DirectoryStore(tmp_path, LAYOUT, 1 << 20, policy)
    store.write(chain(1, 1, tenant="t"), 0.0)
    path = store._path(chain_keys(1, 1)[0])
    path.write_bytes(path.read_bytes()[:-11] + b"u" + path.read_bytes()[-10:])
    os.utime(path, (0.0, 1000.0))
    assert store.collect(1.0) == 0 and store.read(chain_keys(1, 1)) == right(1, 1)


def test_readers_leases_hold_for_every_machine(tmp_path: Path) -> None:
    reader, collector = opened(tmp_path), opened(tmp_path)
    reader.write(chain(1, 4), 0.0), reader.write(chain(2, 4), 0.0)
    assert reader.pin(chain_keys(1, 5), 500.0) is None and reader.pin([], 500.0) is None
    one, two = reader.pin(chain_keys(1, 3), 500.0), reader.pin(chain_keys(1, 2), 400.0)
    assert one is not None and two is not None and one != two
    assert collector.collect(150.0) == 5  # the fourth block of chain 1, all of chain 2
    assert collector.match(chain_keys(1, 4)) == 3
    assert reader.unpin(one) and not reader.unpin(one)
    assert collector.collect(160.0) == 1 and collector.match(chain_keys(1, 4)) == 2
    assert collector.collect(400.0) == 2  # its end has come
    assert not reader.unpin(two)
    assert not [path for path in (tmp_path / "leases").rglob("*") if path.is_file()]


@pytest.mark.parametrize("leased", [2, 4])
def test_a_lease_taken_while_the_collector_works(tmp_path: Path, leased: int) -> None:
    """The collector has looked at the leases already; it sees the new one afterwards and brings the path back."""
    reader, pins = opened(tmp_path), []

    def at(name: str) -> None:
        if name == "file.discard" and not pins:
            pins.append(reader.pin(chain_keys(1, leased), 500.0))

    reader.write(chain(1, 4), 0.0)
    assert opened(tmp_path, at=at).collect(150.0) == 4 - leased
    assert pins[0] is not None and reader.read(chain_keys(1, leased)) == right(1, leased)
    assert opened(tmp_path).collect(151.0) == 0 and reader.match(chain_keys(1, 4)) == leased


def test_a_lease_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    reader, pins = opened(tmp_path), []

    def at(name: str) -> None:
        if name == "file.discard" and reader.match(chain_keys(1, 4)) < 4 and not pins:
            pins.append(reader.pin(chain_keys(1, 4), 500.0))

    reader.write(chain(1, 4), 0.0)
    assert opened(tmp_path, at=at).collect(150.0) == 4 and pins == [None]
    assert not [path for path in (tmp_path / "leases").rglob("*") if path.is_file()]
