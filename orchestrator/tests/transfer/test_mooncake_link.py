"""What only Mooncake's links have: memory that another process reads, and an engine that must not be waited for.

All that every kind has to do is in the other files, where this kind is one of `transfer_kit.KINDS`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import transfer_kit
from transfer_kit import ID, PATIENT, WAIT, WHY_NOT, Wired, fill, move, parts_of

from orchestrator.transfer import LinkBroken, TcpListener, Times, TransferFailed, TransferUnavailable, frames
from orchestrator.transfer import mooncake_mover as mover_module

if WHY_NOT:
    pytest.skip(WHY_NOT, allow_module_level=True)

from mooncake_peer import KILLED, LARGE

from orchestrator.transfer.mooncake import MooncakeLink
from orchestrator.transfer.mooncake_mover import Mover
from orchestrator.transfer.tcp import SocketStream, stream_of

CHUNK = 4096


@pytest.fixture(scope="module")
def mover():
    """Of small chunks, and few of them."""
    return Mover("127.0.0.1", chunk=CHUNK, chunks=4)


@pytest.fixture(autouse=True)
def all_memory_comes_back(mover):
    yield
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        mover._sweep()
        if mover.staging.free == mover.landing.free == 4 and not mover._reading:
            return
        time.sleep(0.01)
    pytest.fail(f"{mover.staging.free} and {mover.landing.free} of 4 chunks are free")


class Small(Wired):
    """A sender with that mover, and receivers with it too."""

    def __init__(self, mover, times=PATIENT):
        listener = TcpListener(link=lambda stream: MooncakeLink(stream, mover))
        transfer_kit.listen, listen = lambda *_: listener, transfer_kit.listen
        try:
            super().__init__("tcp", times=times)
        finally:
            transfer_kit.listen = listen
        self.mover = mover
        self.dial = lambda timeout: MooncakeLink(
            stream_of(socket.create_connection(listener.address, timeout)), self.mover
        )


@pytest.fixture
def small(mover):
    with Small(mover) as small:
        yield small


@pytest.fixture
def two(mover):
    """Two ends of a link."""
    ends = [MooncakeLink(SocketStream(end), mover) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


class Reads:
    """Stands in for `Mover.read`, with something that goes before it or behind it."""

    def __init__(self, monkeypatch, mover, before=None, behind=None):
        self.count, read = 0, mover.read

        def other(name, life, address, into, timeout):
            self.count += 1
            if before:
                before(self.count)
            read(name, life, address, into, timeout)
            if behind:
                behind(self.count, into)

        monkeypatch.setattr(mover, "read", other)


class Peer:
    def __init__(self, *words):
        pipe = subprocess.PIPE
        command = [sys.executable, str(Path(__file__).with_name("mooncake_peer.py")), *words]
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def line(self):
        return self.child.stdout.readline().split()

    def stop(self):
        os.kill(self.child.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.001)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def peer():
    with Peer("memory") as peer:
        peer.name, life, address = peer.line()
        peer.life, peer.address = bytes.fromhex(life), int(address)
        yield peer


# Parts


def test_sizes_around_chunks(small):
    parts = parts_of([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 9 * CHUNK + 7, 0, 333])
    assert move(small, parts) == parts


def test_large_parts_over_the_engine_of_the_process():
    parts = parts_of([20 << 20, 1, (20 << 20) + 1])
    with Wired("mooncake", times=PATIENT) as wired:
        assert move(wired, parts) == parts


def test_more_handoffs_than_chunks(small):
    """Each gets on with one chunk, whatever the others have."""
    parts = {bytes([n]): parts_of([5 * CHUNK + n, 2 * CHUNK, n], seed=n) for n in range(10)}
    offers = {key: small.sender.offer(key, 1) for key in parts}
    threads = [fill(offers[key], parts[key]) for key in parts]
    pulls = {key: small.pull(key) for key in parts}
    for key, pull in pulls.items():
        with pull:
            assert list(pull.parts(timeout=WAIT)) == parts[key]
            pull.done(timeout=WAIT)
    for thread in threads:
        thread.join()
    assert all(offered.outcome.good for offered in offers.values())


def test_a_part_that_takes_longer_than_silence_and_lease(mover, monkeypatch):
    """Slow reads that go on are not taken for a dead peer by either side."""
    parts = parts_of([30 * CHUNK])
    Reads(monkeypatch, mover, before=lambda count: time.sleep(0.1))
    with Small(mover, Times(beat=0.1, silence=1.0, lease=2.0, dial=5.0)) as small:
        started = time.monotonic()
        assert move(small, parts) == parts
        assert time.monotonic() - started > 2.9


# Faults


def test_changed_bytes_are_asked_for_again(small, mover, monkeypatch):
    def change(count, into):
        if count in (1, 4, 5):
            into[-1] ^= 1

    reads = Reads(monkeypatch, mover, behind=change)
    parts = parts_of([3 * CHUNK, 100])
    assert move(small, parts) == parts
    assert reads.count == 3 * 3 + 2 or reads.count == 4 + 3 * 2


def test_bytes_that_always_change(small, mover, monkeypatch):
    def change(count, into):
        into[0] ^= 1

    Reads(monkeypatch, mover, behind=change)
    small.sender.offer(ID, 1).put("a", bytes(100), timeout=WAIT)
    with small.pull() as pull, pytest.raises(TransferFailed, match="8 times") as error:
        pull.take(timeout=WAIT)
    assert error.value.reason == "checksum"


@pytest.mark.parametrize("broken", [1, 2, 7, 12])
def test_a_read_that_fails_in_the_midst(small, mover, monkeypatch, broken):
    def fail(count):
        if count == broken:
            raise LinkBroken("by the test")

    reads = Reads(monkeypatch, mover, before=fail)
    parts = parts_of([4 * CHUNK, 5, 3 * CHUNK + 1, 4 * CHUNK])
    assert move(small, parts) == parts
    assert reads.count > 13


def test_a_reader_that_is_late_gets_no_foreign_bytes(two, mover, monkeypatch):
    """Its sender has given up, and the memory is another handoff's: a broken link, though the read itself goes well."""
    sender, receiver = two
    given_up, mine, foreign = threading.Event(), bytes(range(256)) * 16, b"foreign!" * 512
    seen = []
    Reads(
        monkeypatch,
        mover,
        before=lambda count: given_up.wait(WAIT),
        behind=lambda count, into: seen.append(bytes(into)),
    )
    results = []

    def receive():
        try:
            results.append(receiver.receive(WAIT, lambda: CHUNK, stall=WAIT))
        except LinkBroken as error:
            results.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    with pytest.raises(LinkBroken, match="read nothing"):
        sender.send(frames.Piece(0, "a", 0), mine, stall=0.2)
    others = [mover.staging.take(0) for _ in range(4)]
    assert None not in others
    for chunk in others:
        chunk.view[:] = foreign
    given_up.set()
    sender.stop()
    thread.join(WAIT)
    for chunk in others:
        mover.staging.give(chunk)
    assert seen == [foreign] and isinstance(results[0], LinkBroken)


def test_a_reader_that_stalls_past_the_lease(mover, monkeypatch):
    """The sender frees the handoff and says so; the reader fails, and took nothing."""
    times = Times(beat=0.05, silence=0.3, lease=0.8, dial=5.0)
    stalled = threading.Event()
    Reads(monkeypatch, mover, before=lambda count: stalled.wait(WAIT))
    with Small(mover, times) as small:
        offered = small.sender.offer(ID, 1)
        offered.put("a", bytes(3 * CHUNK), timeout=WAIT)
        with small.pull() as pull:
            with pytest.raises(TransferFailed, match="lease"):
                offered.wait(timeout=WAIT)
            assert offered.held == 0
            stalled.set()
            with pytest.raises(TransferFailed):
                pull.take(timeout=WAIT)


MESSAGES = {
    "more than the part": [frames.Staged("127.0.0.1:1", b"", 1, 101)],
    "nothing": [frames.Staged("127.0.0.1:1", b"", 1, 0)],
    "no address": [frames.Staged("127.0.0.1:1", b"", 0, 100)],
    "no name": [frames.Staged("127.0.0.1", b"", 1, 100)],
    "kept early": [frames.Kept(1)],
    "another message": [frames.Alive()],
    "nobody there": [frames.Staged("127.0.0.1:1", b"", 1, 100)],
}


@pytest.mark.parametrize("said", MESSAGES)
def test_what_a_sender_must_not_say(two, said):
    sender, receiver = two
    sender._stream.write(memoryview(frames.pack(frames.Piece(0, "a", 0), 100)), WAIT)
    for message in MESSAGES[said]:
        sender.send(message, stall=WAIT)
    with pytest.raises(LinkBroken):
        receiver.receive(WAIT, lambda: 100, stall=5.0)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_a_receiver_must_not_say(two, count):
    sender, receiver = two
    receiver.send(frames.Copied(count), stall=WAIT)
    with pytest.raises(LinkBroken, match="copied: got"):
        sender.receive(WAIT, lambda: 0, stall=WAIT)


# Other processes


def test_the_sender_is_killed_in_the_midst():
    """What came is whole; then it fails within the lease."""
    with Peer("send") as peer:
        (port,) = peer.line()
        dial = transfer_kit.functools.partial(transfer_kit.transfer.dial_mooncake, "127.0.0.1", int(port))
        with transfer_kit.Receiver(dial, times=KILLED).pull(ID, 1) as pull:
            assert pull.take(timeout=WAIT) == LARGE[0]
            peer.child.kill()
            came = []
            with pytest.raises(TransferFailed, match="lease"):
                came.extend(pull.parts(timeout=WAIT))
            while True:
                try:
                    came.append(pull.take(timeout=0))
                except TransferFailed:
                    break
            assert all(part in LARGE for part in came)


def test_the_receiver_is_killed_in_the_midst():
    with Wired("mooncake", transfer_kit.Limits(held=40_000_000), KILLED) as wired:
        mover = mover_module.mover_of("127.0.0.1")
        offered = wired.sender.offer(ID, 1)
        offered._times = PATIENT
        with Peer("receive", str(wired.dial.args[1])) as peer:
            putting = threading.Thread(target=put_until_it_fails, args=(offered,))
            putting.start()
            assert peer.line() == ["0"]
            offered._times = KILLED
            peer.child.kill()
            putting.join(WAIT)
            assert not putting.is_alive() and offered.outcome.reason == "lease"
        until = time.monotonic() + WAIT
        while mover.staging.free < mover_module.CHUNKS and time.monotonic() < until:
            time.sleep(0.01)
        assert mover.staging.free == mover_module.CHUNKS and wired.sender.held == 0


def put_until_it_fails(offered):
    with contextlib.suppress(TransferFailed):
        while True:
            for part in LARGE:
                offered.put(*part, timeout=WAIT)


def test_a_stopped_peer_keeps_the_memory_of_its_reads_and_no_more(mover, peer, monkeypatch):
    """A read that is given up goes on: its chunk is nobody's until it has ended; and half of all stay for others."""
    for name in ("PROGRESS", "STATUS"):
        monkeypatch.setenv(f"MC_TCP_{name}_TIMEOUT_SEC", "300")
    into = memoryview(bytearray(CHUNK))
    mover.read(peer.name, peer.life, peer.address, into, WAIT)
    assert bytes(into) == bytes(CHUNK)
    peer.stop()
    for why in ("have not come", "have not come", "no registered memory"):
        with pytest.raises(LinkBroken, match=why):
            mover.read(peer.name, peer.life, peer.address, into, 0.1)
    assert mover.landing.free == 2
    own = mover.staging.take(0)
    own.view[:] = b"!" * CHUNK
    mover.read(mover.engine.name, mover.engine.life, own.address, into, WAIT)
    assert bytes(into) == b"!" * CHUNK
    mover.staging.give(own)
    os.kill(peer.child.pid, signal.SIGCONT)
    until = time.monotonic() + WAIT
    while mover.landing.free < 4 and time.monotonic() < until:
        mover._sweep()
        time.sleep(0.01)
    mover.read(peer.name, peer.life, peer.address - CHUNK, into, WAIT)
    assert bytes(into) == bytes([1]) * CHUNK


def test_a_peer_that_has_gone(mover, peer):
    into = memoryview(bytearray(CHUNK))
    mover.read(peer.name, peer.life, peer.address, into, WAIT)
    peer.child.kill()
    peer.child.wait()
    for _ in range(3):
        with pytest.raises(LinkBroken, match=r"could not be read|have not come"):
            mover.read(peer.name, peer.life, peer.address, into, 5.0)


def test_memory_that_is_not_registered(mover, peer):
    with pytest.raises(LinkBroken, match="could not be read"):
        mover.read(peer.name, peer.life, 4096, memoryview(bytearray(100)), WAIT)


def test_another_process_of_that_name(mover, peer, monkeypatch):
    """The engine would go on asking the first one for ever."""
    monkeypatch.setattr(mover_module, "_RETIRED", 2)
    into, before = memoryview(bytearray(CHUNK)), mover.engine
    mover.read(peer.name, b"old", peer.address, into, WAIT)
    assert mover.engine is before
    mover.read(peer.name, b"new", peer.address, into, WAIT)
    assert mover.engine is not before and bytes(into) == bytes(CHUNK)
    for life in range(4):
        mover.read(peer.name, bytes([life]), peer.address, into, WAIT)
    assert len(mover._retired) == 2


def test_a_peer_that_never_answers_the_first_call(mover, peer):
    """Its caller waits as long as it said, and others go on with another engine."""
    into = memoryview(bytearray(CHUNK))
    mover.read(peer.name, peer.life, peer.address, into, WAIT)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(LinkBroken, match="does not answer"):
            mover.read(f"127.0.0.1:{silent.getsockname()[1]}", b"", 4096, into, 0.3)
        mover.read(peer.name, peer.life, peer.address, into, WAIT)
        assert time.monotonic() - started < 20
        with contextlib.suppress(OSError):
            silent.accept()[0].close()  # ends the call that was left behind


def test_a_process_ends_while_a_read_goes_on(peer):
    peer.stop()
    with Peer("leave", peer.name, str(peer.address)) as leaving:
        assert leaving.line()[0] == "broken"
        assert leaving.child.wait(WAIT) == 0


# The library


def test_nothing_is_loaded_before_it_is_asked_for():
    code = "import sys, orchestrator.transfer; print([m for m in sys.modules if 'mooncake' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    for call in (
        lambda: Mover("127.0.0.1"),
        lambda: transfer_kit.transfer.dial_mooncake("127.0.0.1", 1, 1.0),
    ):
        with pytest.raises(TransferUnavailable, match=r"mooncake-transfer-engine-non-cuda.*libibverbs1"):
            call()
    assert issubclass(TransferUnavailable, ImportError)


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"host": "::1"}, {"host": ""}, {"protocol": "udp"}])
def test_arguments(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Mover(**{"host": "127.0.0.1", **options})


def test_a_child_of_a_fork_has_an_engine_of_its_own():
    mover = mover_module.mover_of("127.0.0.1")
    child = os.fork()
    if not child:
        os._exit(0 if not mover_module._MOVERS and mover_module._FORKED else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mover_module.mover_of("127.0.0.1") is mover
