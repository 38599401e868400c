"""One folder, several processes that write, read and collect; and what an engine hands on beside its thread."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.cache.chain import Chain, ChainScope, block_keys, parents
from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import Block, Put
from orchestrator.cache.store.directory import DirectoryStore
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.cache.windows import WindowKey, WindowStore
from orchestrator.engine.store_writer import Job, StoreWriter
from orchestrator.engine.stored_windows import StoredWindows

LAYOUT = b"L" * 32
ROOT = ChainScope(model=b"m", layout=LAYOUT).root()
SIZE = 4096


def payload(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(SIZE)


def chain(number: int, blocks: int) -> list[Block]:
    keys = block_keys(ROOT, [number * 1000 + block for block in range(blocks) for _ in range(128)])
    return [Block(key, parent, depth, payload(key))
            for depth, (key, parent) in enumerate(zip(keys, parents(ROOT, keys), strict=True))]  # fmt: skip


def opened(folder: Path, capacity: int = 1 << 22, **options) -> DirectoryStore:
    policy = RetentionPolicy(grace_s=0.05, high=0.5, low=0.3)
    return DirectoryStore(folder, LAYOUT, capacity, policy, **options)


WRITER = """
import random, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_many_writers import chain, opened, payload
rng = random.Random(sys.argv[3])
store = opened(Path(sys.argv[2]), 40 * 4300)
print("up", flush=True)
puts = set()
end = time.monotonic() + 60
for turn in range(150):
    blocks = chain(rng.randrange(6), rng.randrange(1, 8))
    puts |= {put.value for put in store.write(blocks, time.time())}
    keys = [block.key for block in blocks]
    for key, found in zip(keys, store.read(keys)):
        assert found is None or found == payload(key), "foreign bytes"
    if turn % 5 == 0:
        store.collect(time.time())
    if time.monotonic() > end:
        break
print(" ".join(sorted(puts)), flush=True)
"""


def test_processes_write_read_and_collect_one_folder(tmp_path: Path) -> None:
    """The same blocks, in a folder that holds a part of them; one of the processes is killed."""
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(tmp_path)]
    writers = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(4)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "up\n"
        writers[3].send_signal(signal.SIGKILL)
        said = [writer.communicate(timeout=180)[0].split() for writer in writers[:3]]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(60)
    assert [writer.returncode for writer in writers[:3]] == [0, 0, 0]
    assert all(set(words) <= {"stored", "already", "no_parent", "full"} and "stored" in words for words in said)
    store = opened(tmp_path)
    store.collect(2e9)
    for number in range(6):
        keys = [block.key for block in chain(number, 8)]
        for key, there, found in zip(keys, store.present(keys), store.read(keys), strict=True):
            assert (found is not None) == there and found in (None, payload(key))


def test_two_stores_of_one_process_write_the_same_block(tmp_path: Path) -> None:
    """Host and process are the same, as for containers with equal names: neither takes the other's half file."""
    began, go = threading.Event(), threading.Event()

    def at(name: str) -> None:
        if name == "file.half":
            began.set()
            assert go.wait(30)

    slow, quick = opened(tmp_path, at=at), opened(tmp_path)
    puts: list[Put] = []
    thread = threading.Thread(target=lambda: puts.extend(slow.write(chain(1, 1), 0.0)))
    thread.start()
    assert began.wait(30)
    assert quick.write(chain(1, 1), 0.0) == [Put.STORED]
    go.set()
    thread.join(30)
    key = chain(1, 1)[0].key
    assert puts == [Put.STORED] and quick.read([key]) == [payload(key)]


def test_how_full_it_is_is_known_to_those_that_do_not_collect(tmp_path: Path) -> None:
    one, two = opened(tmp_path, 20 * 4300, turn_s=5.0), opened(tmp_path, 20 * 4300, turn_s=5.0)
    one.write(chain(1, 6), 0.0), two.write(chain(2, 6), 0.0)
    assert one.collect(10.0) == 6 and two.collect(12.0) == 0  # its turn is not yet
    assert two.stats().blocks == one.stats().blocks == 6 and two.stats().used == one.stats().used
    two.write(chain(3, 8), 13.0)
    assert two.collect(15.0) > 0
    (tmp_path / "usage").write_bytes(b"half")
    assert one.collect(16.0) == 0 and one.stats().blocks == 6  # what it knew


def test_a_child_written_during_the_walk_is_no_hole(tmp_path: Path, monkeypatch) -> None:
    """The walk has passed the parent's folder when both are written, and comes to the child's."""
    from orchestrator.cache.store import directory_survey

    store, blocks = opened(tmp_path), chain(1, 3)
    store.write(blocks, 0.0)
    walk = directory_survey.files
    parent = blocks[0].key.hex()
    monkeypatch.setattr(directory_survey, "files", lambda root: (p for p in walk(root) if p.name != parent))
    assert store.collect(1.0) == 0
    monkeypatch.undo()
    assert store.match([block.key for block in blocks]) == 3
    store._path(blocks[0].key).unlink()
    assert store.collect(1.0) == 2  # holes now, both in one turn


def test_an_unreadable_folder_is_a_miss(tmp_path: Path) -> None:
    store, block = opened(tmp_path / "mounted"), chain(1, 1)[0]
    store.write([block], 0.0)
    (tmp_path / "mounted").rename(tmp_path / "gone")
    (tmp_path / "mounted").write_text("")  # every look below it fails with another error than absence
    assert store.present([block.key]) == [False] and store.read([block.key]) == [None]
    assert store.write([block], 0.0) == [Put.FAILED]
    os.remove(tmp_path / "mounted")
    (tmp_path / "gone").rename(tmp_path / "mounted")
    assert store.read([block.key]) == [payload(block.key)]


# Beside the engine's thread


@pytest.fixture
def client(tmp_path: Path) -> CacheClient:
    store = EmbeddedStore(tmp_path / "embedded", LAYOUT, 1 << 22)
    arena = HostArena.create(tmp_path / "arena", LAYOUT, 16, SIZE)
    return CacheClient.inline(store, arena, ChainScope(model=b"m", layout=LAYOUT))


def job(number: int, blocks: int, first: int = 0) -> Job:
    found = chain(number, blocks)
    keys = [block.key for block in found]
    return Job(ROOT, keys, first, [payload(key) for key in keys[first:]], Retention.CHAT, "")


def test_a_long_prompt_is_stored_though_few_slots_may_be_filling(client: CacheClient) -> None:
    writer = StoreWriter(client)  # four slots at once
    assert writer.put(job(1, 40)) and writer.put(job(1, 44)) and writer.put(job(2, 3)) and writer.flush(60)
    assert client.there([block.key for block in chain(1, 44)]) == 44
    assert writer.counts["stored"] == 47 and writer.counts["there"] == 40
    writer.close()
    assert not writer.put(job(3, 1))


def test_what_cannot_be_stored_is_counted(client: CacheClient) -> None:
    writer = StoreWriter(client, most_bytes=3 * SIZE)
    assert not writer.put(job(1, 4)) and writer.counts["dropped"] == 4
    assert writer.put(job(1, 3, first=1)) and writer.flush(60)
    assert writer.counts["no_parent"] == 2 and client.there([block.key for block in chain(1, 3)]) == 0
    assert writer.put(Job(ROOT, [b"k" * 32], 0, [b"short"], Retention.CHAT, "")) and writer.flush(60)
    assert writer.counts["failed"] == 1
    assert writer.put(job(1, 2)) and writer.flush(60) and writer.counts["stored"] == 2
    writer.close()


def test_snapshots_come_back_whole_or_not_at_all(client: CacheClient) -> None:
    """Cut into pieces of a block's size, the last filled up; the first of the keys that is there counts."""
    kept, here = WindowStore(b"W" * 32, 1 << 20), WindowStore(b"W" * 32, 1 << 20)
    keys = [WindowKey(bytes([number]) * 32, 128 * number) for number in (3, 2, 1)]
    writer = StoreWriter(client)
    size = 128 + 2 * SIZE + 77
    stored = StoredWindows(client, writer, b"W" * 32, size, SIZE, 30.0)
    here.peers = (stored,)
    assert stored.pieces == 3 and here.pull(keys) is None and stored.counts["absent"] == 1
    snapshots = {key: os.urandom(size - 128) for key in keys[1:]}
    for key, snapshot in snapshots.items():
        kept.put(key, snapshot)
        stored.put(key, kept.peek(key) or b"", Retention.CHAT, "")
    assert writer.flush(60)
    assert here.pull(keys) == keys[1] and here.get(keys[1]) == snapshots[keys[1]] and not here.has(keys[2])
    other = StoredWindows(client, writer, b"X" * 32, size, SIZE, 30.0)
    assert other.first(keys) is None  # of another model: other keys
    path = stored._path(keys[0])
    client.insert(Chain(path.root), 0, [])
    half = Job(path.root, path.keys, 0, [bytes(SIZE)] * 2, Retention.CHAT, "")
    assert writer.put(half) and writer.flush(60) and stored.first(keys[:1]) is None
    whole = Job(path.root, path.keys, 2, [bytes(SIZE)], Retention.CHAT, "")
    assert writer.put(whole) and writer.flush(60) and here.pull(keys[:1]) is None and here.counters["wrong"] == 1
    writer.close()
