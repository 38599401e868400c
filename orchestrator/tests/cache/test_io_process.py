"""Two processes, either of which is killed: the other goes on and never sees a wrong byte."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_kit import CHAT, LAYOUT, KillAt, chain_keys, in_child, payload

from orchestrator.cache.chain import ChainScope
from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.process import IoProcess
from orchestrator.cache.io.shell import IoShell
from orchestrator.cache.store.base import Put
from orchestrator.cache.store.embedded import EmbeddedStore

SCOPE = ChainScope(model=b"m", layout=LAYOUT)


def tokens(number: int, blocks: int) -> list[int]:
    return [number * 100_000 + block for block in range(blocks) for _ in range(128)] + [7]


def until(true, what: str) -> None:
    """Wait for another process; 20 s are a failure, not a measurement."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[IoProcess]:
    store = {"kind": "embedded", "folder": str(tmp_path / "store"), "capacity": 1 << 20}
    process = IoProcess(tmp_path / "io", store, LAYOUT, block_bytes=256, slots=32)
    process.start()
    yield process
    process.stop()


def client_of(process: IoProcess) -> CacheClient:
    return CacheClient(process.socket_path, process.arena_path, SCOPE, answer_s=20.0)


def insert(client: CacheClient, number: int, blocks: int) -> list[Put]:
    plan = client.match(tokens(number, blocks))
    handle = client.insert(plan.chain, 0, [payload(key) for key in plan.chain.keys], CHAT)
    assert handle.wait(20)
    return handle.puts


def fetched(client: CacheClient, number: int, blocks: int) -> list[bytes | None]:
    woken = threading.Event()
    fetch = client.fetch(client.match(tokens(number, blocks)), 10.0, on_done=lambda _: woken.set())
    assert woken.wait(20)
    found = [fetch.payload(n) for n in range(fetch.blocks)]
    fetch.release()
    return found


def right(number: int, blocks: int) -> list[bytes]:
    return [payload(key) for key in chain_keys(number, blocks)]


def test_the_io_process_dies_and_the_engine_goes_on(process: IoProcess) -> None:
    client = client_of(process)
    assert insert(client, 1, 6) == [Put.STORED] * 6
    plan = client.match(tokens(1, 6))
    fetch = client.fetch(plan, 10.0)
    assert fetch.wait(20) and fetch.blocks == 6
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not client.alive, "the client never noticed")
    assert [fetch.payload(n) for n in range(6)] == right(1, 6) and fetch.intact() == 6
    assert client.match(tokens(1, 6)).blocks == 0
    late = client.fetch(plan, 10.0)
    assert late.done and late.blocks == 0
    handle = client.insert(plan.chain, 0, right(1, 6))
    assert handle.done and handle.puts == [Put.FAILED] * 6
    process.start()
    until(lambda: client.match(tokens(1, 6)).blocks == 6, "the client never came back")
    assert client.numbers()["ready"] == 6  # taken over from the arena
    assert fetched(client, 1, 6) == right(1, 6)
    for number in range(2, 9):  # the slots of the first life are given out again
        insert(client, number, 6)
    assert fetch.intact() < 6
    assert all(found in (None, expected)
               for found, expected in zip([fetch.payload(n) for n in range(6)], right(1, 6), strict=True))  # fmt: skip
    assert fetched(client, 1, 6) == right(1, 6)


def test_a_silent_io_process_holds_nobody_up(process: IoProcess) -> None:
    assert insert(client_of(process), 1, 3) == [Put.STORED] * 3
    asking, fetching, telling = (
        CacheClient(process.socket_path, process.arena_path, SCOPE, answer_s=0.2) for _ in range(3)
    )
    plan = client_of(process).match(tokens(1, 3))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        woken = threading.Event()
        fetch = fetching.fetch(plan, 0.1, on_done=lambda _: woken.set())
        assert woken.wait(20) and fetch.blocks == 0  # at its deadline, though nobody answers

        begun = time.monotonic()
        assert asking.match(tokens(1, 3)).blocks == 0
        assert time.monotonic() - begun >= 0.2
        assert asking.match(tokens(1, 3)).blocks == 0 and asking._waiting == {}
        assert asking._quiet_until > time.monotonic() or asking._pause_s > 2  # not asked a second time

        for _ in range(200):  # more than the socket takes
            telling._tell(m.Match(10**6, [bytes(32)] * 1000))
        assert not telling.alive
    finally:
        os.kill(process.pid, signal.SIGCONT)
    for client in (asking, fetching, telling):
        until(lambda c=client: c.match(tokens(1, 3)).blocks == 3, "the client never asked again")
    assert asking.numbers()["pinned"] == 0


def test_an_engine_dies_and_what_it_held_is_free(process: IoProcess) -> None:
    survivor = client_of(process)
    insert(survivor, 1, 4)

    def engine(say) -> None:
        client = client_of(process)
        fetch = client.fetch(client.match(tokens(1, 4)), 10.0)
        assert fetch.wait(20) and fetch.blocks == 4
        assert client.pin(fetch.keys, 1000.0) is not None
        answer = client._ask(m.Reserve(77, 4))
        assert isinstance(answer, m.Reserved) and client.arena is not None
        slot, generation = answer.slots[0]
        client.arena.write(slot, chain_keys(2, 1)[0], client.root, 0, generation, right(2, 1)[0])
        client.arena.view[client.arena._start(answer.slots[1][0]) + 8 :][:100] = b"x" * 100  # half a header
        say("held")
        os.kill(os.getpid(), signal.SIGKILL)

    status, said = in_child(engine)
    assert status == -signal.SIGKILL and said == ["held"]
    until(lambda: survivor.numbers()["pinned"] == 0, "pins of a dead engine stayed")
    assert survivor.numbers()["filling"] == 0
    assert survivor.match(tokens(2, 1)).blocks == 0  # written, but never committed
    assert insert(survivor, 2, 4) == [Put.STORED] * 4
    assert fetched(survivor, 1, 4) == right(1, 4) and fetched(survivor, 2, 4) == right(2, 4)


def test_an_engine_is_killed_at_every_write_point(process: IoProcess) -> None:
    """Whatever it was writing never appears under a key, or appears whole; its slots are free again."""
    survivor, number, status = client_of(process), 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        number += 1

        def engine(say, number: int = number) -> None:
            client = client_of(process)
            assert client.arena is not None
            client.arena.at = KillAt(number)
            assert insert(client, 100 + number, 2) == [Put.STORED] * 2

        status, _ = in_child(engine)
        until(lambda: survivor.numbers()["filling"] == 0, "slots of a dead engine stayed")
        found = fetched(survivor, 100 + number, 2)
        assert found == (right(100 + number, 2) if status == 0 else [])
    assert status == 0 and number == 11


def test_engines_that_insert_the_same_at_once_store_it_once(process: IoProcess) -> None:
    clients = [client_of(process) for _ in range(3)]
    plans = [client.match(tokens(5, 2)) for client in clients]
    payloads = right(5, 2)
    handles = [c.insert(p.chain, 0, payloads, CHAT) for c, p in zip(clients, plans, strict=True)]
    assert all(handle.wait(20) for handle in handles)
    results = [put for handle in handles for put in handle.puts]
    assert results.count(Put.STORED) == 2 and results.count(Put.ALREADY) == 4
    numbers = clients[0].numbers()
    assert (numbers["ready"], numbers["filling"]) == (2, 0)
    assert all(fetched(client, 5, 2) == payloads for client in clients)


def test_what_is_no_message_cuts_off_its_sender_only(process: IoProcess) -> None:
    good, bad = client_of(process), client_of(process)
    assert bad._link is not None
    bad._link._socket.sendall(b"\x05\x00\x00\x00hello")
    until(lambda: not bad.alive, "the sender was not cut off")
    assert insert(good, 1, 2) == [Put.STORED] * 2


def test_a_store_that_cannot_open_says_why(tmp_path: Path) -> None:
    process = IoProcess(tmp_path / "io", {"kind": "tape"}, LAYOUT, 256, 4)
    with pytest.raises(RuntimeError, match=r"did not start: .*kind: got 'tape', allowed are"):
        process.start()


def test_the_io_process_is_killed_at_every_write_point(folder: Path) -> None:
    """The engine keeps inserting; whatever was confirmed is there after a restart, whatever is there is right."""
    at = 0
    while True:
        at += 1
        place = folder / str(at)
        place.mkdir()
        pid = os.fork()
        if not pid:
            serve(place, at)
        until(lambda f=place: (f / "up").exists(), "no I/O process")
        client = CacheClient(place / "sock", place / "arena", SCOPE, answer_s=20.0)
        stored = {number: puts.count(Put.STORED) for number in (1, 2, 3) if (puts := insert(client, number, 3))}
        client.close()
        if all_stored := stored == {1: 3, 2: 3, 3: 3}:
            os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        store = EmbeddedStore(place / "store", LAYOUT, 1 << 20, segment_bytes=1500)
        for number, count in stored.items():
            keys = chain_keys(number, 3)
            assert store.match(keys) >= count
            found = store.read(keys)
            assert found[:count] == right(number, 3)[:count]
            assert all(one in (None, expected) for one, expected in zip(found, right(number, 3), strict=True))
        arena = HostArena.attach(place / "arena")
        assert all(bytes(arena.payload(slot)) == payload(header.key) for slot, header in arena.survey())
        if all_stored:
            break
    assert at > 20


def serve(folder: Path, at: int) -> None:
    try:
        store = EmbeddedStore(folder / "store", LAYOUT, 1 << 20, segment_bytes=1500, at=KillAt(at))
        arena = HostArena.create(folder / "arena", LAYOUT, 16, 256)
        shell = IoShell(store, arena, folder / "sock")
        (folder / "up").touch()
        shell.run()
    finally:
        os._exit(1)
