"""What is refused, by whom, for which reason; and who frees what when the other side ends."""

from __future__ import annotations

import errno
import os
import socket
import time
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import ID, KINDS, QUICK, WAIT, Wired, parts_of

from orchestrator.transfer import Limits, LinkBroken, SharedListener, Times, TransferFailed, frames
from orchestrator.transfer.link import StreamLink
from orchestrator.transfer.ring import HEAD_BYTES, Ring


def reason_of(pull):
    with pytest.raises(TransferFailed) as error:
        pull.take(timeout=WAIT)
    pull.close()
    return error.value.reason


def test_foreign_and_stale_names(wired):
    offered = wired.sender.offer(ID, 5)
    assert reason_of(wired.pull(b"foreign", 5)) == "unknown"
    assert reason_of(wired.pull(ID, 4)) == reason_of(wired.pull(ID, 6)) == "epoch"
    with pytest.raises(ValueError, match="epoch 5"):
        wired.sender.offer(ID, 5)
    with pytest.raises(ValueError, match="epoch 6"):
        wired.sender.offer(ID, 6)  # the old one has to end first
    assert offered.outcome is None
    assert offered.cancel() and not offered.cancel()
    assert reason_of(wired.pull(ID, 5)) == "cancelled"
    with pytest.raises(ValueError, match="epoch 5"):
        wired.sender.offer(ID, 5)
    wired.sender.offer(ID, 6).put("a", b"6", timeout=WAIT)
    assert reason_of(wired.pull(ID, 5)) == "epoch"
    with wired.pull(ID, 6) as pull:
        assert pull.take(timeout=WAIT) == ("a", b"6")


def test_a_second_receiver(wired):
    """Parts are for one receiver, even when it is away."""
    offered = wired.sender.offer(ID, 1)
    offered.put("a", b"1", timeout=WAIT)
    with wired.pull() as pull:
        assert pull.take(timeout=WAIT) == ("a", b"1")
        assert reason_of(wired.pull()) == "bound"
        offered.put("b", b"2", timeout=WAIT)
        assert pull.take(timeout=WAIT) == ("b", b"2")


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_the_receiver_does_not_allow(kind):
    with Wired(kind) as wired:
        for handoff, limits in ((b"1", Limits(part=99)), (b"2", Limits(total=150)), (b"3", Limits(parts=1))):
            offered = wired.sender.offer(handoff, 1)
            offered.put("a", bytes(90), timeout=WAIT)
            offered.put("b", bytes(100), timeout=WAIT)
            pull = wired.pull(handoff, limits=limits)
            assert pull.take(timeout=WAIT) == ("a", bytes(90))
            assert reason_of(pull) == "size"


def test_what_the_sender_does_not_take(wired):
    wired.sender._limits = Limits(part=10, total=15, parts=3, handoffs=2)
    offered = wired.sender.offer(ID, 1)
    for name, data, match in (
        ("a", bytes(11), "data: got 11 bytes, allowed is at most 10"),
        ("é" * 128, b"", "name"),
        (b"a", b"", "name"),
    ):
        with pytest.raises(ValueError, match=match):
            offered.put(name, data, timeout=WAIT)
    offered.put("a", bytes(10), timeout=WAIT)
    with pytest.raises(ValueError, match="data: got 16 bytes in all, allowed is at most 15"):
        offered.put("b", bytes(6), timeout=WAIT)
    assert offered.count == 1 and offered.held == 10
    offered.put("b", b"", timeout=WAIT)
    offered.put("c", b"", timeout=WAIT)
    with pytest.raises(ValueError, match="3 parts"):
        offered.put("d", b"", timeout=WAIT)
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            offered.put("d", b"", timeout=timeout)
    wired.sender.offer(b"2", 1)
    with pytest.raises(TransferFailed, match="busy"):
        wired.sender.offer(b"3", 1)
    offered.cancel()
    wired.sender.offer(b"3", 1)


@pytest.mark.parametrize(("handoff", "epoch"), [(b"", 1), (bytes(65), 1), ("text", 1), (ID, -1), (ID, 1 << 63)])
def test_names_that_are_none(wired, handoff, epoch):
    for call in (wired.sender.offer, wired.pull):
        with pytest.raises(ValueError, match=r"handoff|epoch"):
            call(handoff, epoch)


def test_settings_that_contradict():
    for make in (
        lambda: Limits(part=0),
        lambda: Limits(window=1.5),
        lambda: Times(beat=0),
        lambda: Times(lease=float("nan")),
        lambda: Times(silence=1, beat=0.5),
        lambda: Times(lease=2, silence=2),
    ):
        with pytest.raises(ValueError, match="allowed is"):
            make()


def test_the_sender_ends(wired):
    """The receiver is told, and keeps what came whole."""
    offered = wired.sender.offer(ID, 1)
    offered.put("a", b"1", timeout=WAIT)
    pull = wired.pull()
    while not pull.waiting:
        time.sleep(0.01)
    wired.sender.close()
    assert pull.take(timeout=WAIT) == ("a", b"1")
    assert reason_of(pull) == "closed"
    with pytest.raises(TransferFailed, match="closed"):
        offered.put("b", b"", timeout=WAIT)
    with pytest.raises(TransferFailed, match="closed"):
        wired.sender.offer(b"new", 1)
    if wired.kind == "tcp":
        started = time.monotonic()
        assert reason_of(wired.pull()) == "lease"  # nobody is there any more
        assert time.monotonic() - started < QUICK.lease + QUICK.dial + 10


def test_the_sender_cancels(wired):
    offered = wired.sender.offer(ID, 1)
    with wired.pull() as pull:
        with pytest.raises(TimeoutError):
            pull.take(timeout=0.05)
        offered.cancel("\udc80" + "x" * 9000)
        with pytest.raises(TransferFailed, match=r"cancelled: \?x"):
            pull.take(timeout=WAIT)


@pytest.mark.parametrize("how", ["close", "refuse"])
def test_the_receiver_ends(wired, how):
    """What the sender holds is free at once, not after a lease, and a `put` that waits says why."""
    wired.sender._limits = Limits(held=100)
    offered = wired.sender.offer(ID, 1)
    offered.put("a", bytes(100), timeout=WAIT)
    pull = wired.pull()
    while not pull.waiting:
        time.sleep(0.01)
    started = time.monotonic()
    if how == "refuse":
        pull.done(timeout=WAIT, good=False, why="room: none")
        with pytest.raises(ValueError, match="good"):
            pull.done(timeout=WAIT)
    pull.close()
    with pytest.raises(TransferFailed, match="room: none" if how == "refuse" else "was closed"):
        offered.put("b", bytes(100), timeout=WAIT)
    assert time.monotonic() - started < 10 and offered.held == 0


def test_nobody_comes():
    """A handoff that is not asked for ends with its lease, with no call to its sender."""
    with Wired("local") as wired:
        offered = wired.sender.offer(ID, 1)
        offered.put("a", bytes(100), timeout=WAIT)
        time.sleep(QUICK.lease + 4 * QUICK.beat)
        assert offered.held == 0 and offered.outcome.reason == "lease"


def test_an_end_is_remembered_and_forgotten():
    times = Times(beat=0.05, silence=0.3, lease=1.0, tombstone=0.2)
    with Wired("local", times=times) as wired:
        wired.sender.offer(ID, 1).cancel()
        assert reason_of(wired.pull()) == "cancelled"
        time.sleep(0.4)
        assert reason_of(wired.pull()) == "unknown"
        for number in range(5):
            wired.sender._limits = Limits(handoffs=1)
            wired.sender.offer(bytes([number]), 1).cancel()
        assert len(wired.sender._offers) <= 4


def test_another_sender_at_the_same_place():
    """Parts of one life of a sender are not continued by the next one."""
    with Wired("tcp") as first, Wired("tcp") as second:
        ways = [first.dial]
        first.sender.offer(ID, 1).put("a", b"1", timeout=WAIT)
        other = second.sender.offer(ID, 1)
        other.put("a", b"2", timeout=WAIT)
        pull = first.pull(dial=lambda timeout: (ways.pop() if ways else second.dial)(timeout))
        assert pull.take(timeout=WAIT) == ("a", b"1")
        pull._link.stop()
        assert reason_of(pull) == "restarted"


def test_shared_memory_that_is_full(monkeypatch):
    """The room is taken before a link is used; without it there is none, the receiver waits for its lease at most."""
    asked = []

    def full(file, start, size):
        asked.append(size)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Wired("shared") as wired:
        wired.sender.offer(ID, 1).put("a", b"1", timeout=WAIT)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(LinkBroken, match="no room"):
                wired.dial(WAIT)
        assert asked == [4096 + 65536 + 256]
        with wired.pull() as pull:
            assert pull.take(timeout=WAIT) == ("a", b"1")


class Somebody:
    """Instead of what the kernel says of a peer."""

    size = 12

    @staticmethod
    def unpack(data):
        return 1, 54321, 1


def test_processes_of_another_user(monkeypatch):
    with Wired("shared") as wired:
        with monkeypatch.context() as patch:
            patch.setattr("orchestrator.transfer.shared._PEER", Somebody)
            with pytest.raises(LinkBroken, match="another user"):
                wired.dial(WAIT)
        wired.dial(WAIT).close()


@pytest.mark.parametrize("counts", [(5000, 0), (0, 1), ((1 << 64) - 1, 0)])
def test_counters_of_a_ring_that_cannot_be(counts):
    """Whatever the other process writes there, no byte outside of the ring is touched."""
    memory, bells = bytearray(HEAD_BYTES + 4096), socket.socketpair()
    memoryview(memory).cast("Q")[0:16:8] = memoryview(array("Q", counts))
    ring = Ring(memoryview(memory), bells[0])
    for call in (ring.read_into, ring.write):
        with pytest.raises(LinkBroken, match="ring: got"):
            call(memoryview(bytearray(10)), 0)
    ring.close()
    bells[1].close()


@pytest.mark.parametrize("size", [0, 4095, (1 << 32) + 1])
def test_rings_of_a_size_that_is_not_allowed(size):
    with pytest.raises(ValueError, match="ring_bytes"):
        SharedListener(size)


class Bytes:
    """A `Stream` of given bytes."""

    def __init__(self, data):
        self.data, self.largest = data, 0

    def read_into(self, view, timeout):
        self.largest = max(self.largest, len(view))
        done = min(len(view), len(self.data))
        view[:done], self.data = self.data[:done], self.data[done:]
        return done


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_message_or_refused(data, prefixed):
    stream = Bytes(b"FTX1" + data if prefixed else data)
    try:
        got = StreamLink(stream).receive(0, lambda: 1000, stall=0)
    except LinkBroken:
        got = None
    assert got is None and stream.largest <= frames.MESSAGE_BYTES


@pytest.mark.parametrize("size", [1001, 1 << 40, (1 << 64) - 1])
def test_nothing_is_allocated_for_a_size_that_is_not_allowed(size):
    stream = Bytes(frames.pack(frames.Piece(0, "a", 0), size))
    with pytest.raises(LinkBroken, match=f"payload: got {size} bytes, allowed are 1000"):
        StreamLink(stream).receive(0, lambda: 1000, stall=0)
    assert stream.largest < 100


def test_messages_that_are_none():
    for head in (
        frames.pack(frames.Alive(), 5),
        frames.pack(msgspec.defstruct("Other", [], tag=True, array_like=True)(), 0),
        frames.pack(["Ack", "three"], 0),
    ):
        with pytest.raises(LinkBroken) as error:
            StreamLink(Bytes(head)).receive(0, lambda: 1000, stall=0)
        assert error.value.reason == "message"
    with pytest.raises(ValueError, match="message: got"):
        frames.pack(frames.Refused("unknown", "x" * 5000), 0)


def test_answers_that_do_not_belong_here(wired):
    """A receiver that takes more than there is, or praises what it has not got, is cut off; nothing is freed for it."""
    wired.sender._times = Times(beat=0.05, silence=0.3, lease=30)
    offered = wired.sender.offer(ID, 1)
    offered.put(*parts_of([50])[0], timeout=WAIT)
    for message in (
        frames.Ack(2),
        frames.Verdict(True, ""),
        frames.Welcome(b""),
        frames.Ask(ID, 1, b"p", b"", 0, 0, 9),
    ):
        link = wired.dial(1.0)
        link.send(frames.Ask(ID, 1, b"p", b"", 0, 0, 9), stall=1)
        assert isinstance(link.receive(WAIT, lambda: 0, stall=1)[0], frames.Welcome)
        link.send(message, stall=1)
        with pytest.raises(LinkBroken):
            while link.receive(WAIT, lambda: 100, stall=1):
                pass
        link.close()
        assert offered.outcome is None and offered.held == 50
    for ask in (
        frames.Ask(ID, 1, b"p", b"", 0, 2, 9),
        frames.Ask(ID, 1, b"p", b"", 1, 0, 9),
        frames.Ask(ID, 1, b"p", b"", -1, 0, 9),
    ):
        link = wired.dial(1.0)
        link.send(ask, stall=1)
        assert link.receive(WAIT, lambda: 0, stall=1)[0].reason == "gone"
        link.close()
