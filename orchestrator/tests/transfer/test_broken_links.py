"""Links that break at any byte, bytes that change, peers that fall silent: what was begun goes on or fails in time."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import ID, IN_STREAM, PATIENT, QUICK, STREAMS, WAIT, Dialer, Relay, Wired, fill, move, parts_of

from orchestrator.transfer import TransferFailed, dial_tcp, frames

PARTS = parts_of([0, 1, 300, 33])
TOLD = [
    frames.Welcome(bytes(16)),
    *(frames.Piece(i, PARTS[i][0], 1 << 31) for i in range(4)),
    frames.End(4),
    frames.Closed(),
]
BESIDE = [each for i in (1, 2, 3) for each in (frames.Staged("127.0.0.1:15000", bytes(8), 1 << 40, 1), frames.Kept(i))]


def length(messages):
    return sum(len(frames.pack(message, 0)) for message in messages)


BYTES = length(TOLD) + min(334, length(BESIDE)) - 4 * 4 - 1  # a receiver reads more: a CRC may be short


@pytest.mark.parametrize("kind", STREAMS)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, BYTES), min_size=1, max_size=6))
def test_cut_at_any_byte_and_resumed(kind, cuts):
    """Each part once, whatever had come of it; only a whole one is not sent again."""
    with Wired(kind, times=PATIENT) as wired:
        dialer = Dialer(wired.dial, [{"cut": cut} for cut in cuts])
        assert move(wired, PARTS, dial=dialer) == PARTS
        assert dialer.links >= 2


@pytest.mark.parametrize("kind", STREAMS)
def test_cut_at_every_byte_of_one_part(kind):
    """Without luck: the first link ends at each second byte in turn, the others are of the other kind."""
    parts = parts_of([5, 2])
    with Wired(kind, times=PATIENT) as wired:
        for cut in range(kind == "tcp", 150, 2):
            handoff = bytes([cut])
            offered = wired.sender.offer(handoff, 1)
            thread = fill(offered, parts)
            dialer = Dialer(wired.dial, [{"cut": cut}])
            with wired.pull(handoff, dial=dialer) as pull:
                assert list(pull.parts(timeout=WAIT)) == parts
                pull.done(timeout=WAIT)
            thread.join()
            assert offered.outcome.good
        assert wired.sender.held == 0


@pytest.mark.parametrize("kind", STREAMS)
@settings(max_examples=20, deadline=None)
@given(flips=st.lists(st.integers(0, BYTES), min_size=1, max_size=4))
def test_a_changed_byte_is_asked_for_again(kind, flips):
    with Wired(kind, times=PATIENT) as wired:
        dialer = Dialer(wired.dial, [{"flip": flip} for flip in flips])
        assert move(wired, PARTS, dial=dialer) == PARTS
        assert dialer.links >= 2


@pytest.mark.parametrize("kind", IN_STREAM)
def test_a_part_that_always_comes_broken(kind):
    """Tries are bounded, and the owner sees none of its bytes."""
    with Wired(kind) as wired:
        offered = wired.sender.offer(ID, 1)
        offered.put("a", bytes(5000), timeout=WAIT)
        dialer = Dialer(wired.dial, [{"flip": 3000}] * 50)
        with wired.pull(dial=dialer) as pull:
            with pytest.raises(TransferFailed) as error:
                pull.take(timeout=WAIT)
            assert error.value.reason == "checksum" and "8 times" in str(error.value)
            assert dialer.links == QUICK.tries and pull.waiting == 0


def test_a_whole_part_is_not_sent_again():
    """A link that ends behind a large part costs no second copy of it."""
    read, parts = 0, parts_of([200_000, 10])
    with Wired("tcp") as wired:

        def dial(timeout):
            link = Dialer(wired.dial, [{"cut": 200_150} if not read else {}])(timeout)
            stream, original = link._stream, link._stream.read_into

            def read_into(view, timeout):
                nonlocal read
                done = original(view, timeout)
                read += done
                return done

            stream.read_into = read_into
            return link

        assert move(wired, parts, dial=dial) == parts
    assert 200_150 <= read < 201_000


def test_parts_that_wait_for_their_owner_are_not_sent_again(wired):
    """A new link begins behind what has come, taken or not."""
    offered, links = wired.sender.offer(ID, 1), []

    def dial(timeout):
        links.append(wired.dial(timeout))
        return links[-1]

    for part in PARTS:
        offered.put(*part, timeout=WAIT)
    with wired.pull(dial=dial) as pull:
        while pull._inbox.next < len(PARTS):
            time.sleep(0.005)
        links[0].stop()
        time.sleep(0.1)
        assert pull.take(timeout=WAIT) == PARTS[0] and offered.held == 334
        offered.put("last", b"x", timeout=WAIT)
        offered.finish()
        assert list(pull.parts(timeout=WAIT)) == [*PARTS[1:], ("last", b"x")]
        pull.done(timeout=WAIT)
        assert len(links) == 2


class Late:
    """A link whose first answer is handed on after `amid`."""

    def __init__(self, link, amid):
        self._link, self._amid = link, amid
        self.send, self.stop, self.close = link.send, link.stop, link.close

    def receive(self, *args, **options):
        got = self._link.receive(*args, **options)
        amid, self._amid = self._amid, None
        if amid is not None:
            amid()
        return got


def test_what_the_owner_does_while_a_link_begins(wired):
    """It takes a part, and concludes, between two links: the sender is told over the next one."""
    offered, took, threads = wired.sender.offer(ID, 1), [], []
    offered.put("a", b"1", timeout=WAIT)
    offered.finish()

    def conclude():
        threads.append(threading.Thread(target=lambda: pull.done(timeout=WAIT)))
        threads[0].start()
        while pull._verdict is None:
            time.sleep(0.001)

    steps = [None, lambda: took.extend(pull.parts(timeout=WAIT)), conclude]
    with wired.pull(dial=lambda timeout: Late(wired.dial(timeout), steps.pop(0))) as pull:
        while pull._inbox.end is None:
            time.sleep(0.001)
        pull._link.stop()
        until = time.monotonic() + WAIT
        while offered.held and time.monotonic() < until:
            time.sleep(0.001)
        assert took == [("a", b"1")] and offered.held == 0 and offered.outcome is None
        pull._link.stop()
        offered.wait(timeout=WAIT)
        threads[0].join()
        assert not steps


def test_an_answer_that_was_lost_is_asked_for_again(wired):
    """The sender had the verdict, the receiver does not know: it asks, and is told the same."""
    offered = wired.sender.offer(ID, 1)
    offered.put("a", b"1", timeout=WAIT)
    offered.finish()
    pull = wired.pull()
    assert len(list(pull.parts(timeout=WAIT))) == 1
    receive, link = pull._inbox.conclude, pull._link
    lost = []

    def lose():
        pull._inbox.conclude = receive
        lost.append(link.stop())

    pull._inbox.conclude = lose
    pull.done(timeout=WAIT)
    assert lost == [None] and offered.outcome.good
    pull.close()


@pytest.mark.parametrize("when", ["before", "amid"])
def test_a_peer_that_is_half_open(when):
    """Nothing comes and nothing is said to have ended: noticed in time, and gone on with over another link."""
    parts = parts_of([1000] * 5)
    with Wired("tcp") as wired:
        relay = Relay(wired.dial.args)
        ways = [functools.partial(dial_tcp, *relay.address)]
        offered = wired.sender.offer(ID, 1)
        with wired.pull(dial=lambda timeout: (ways.pop() if ways else wired.dial)(timeout)) as pull:
            came = []
            if when == "amid":
                offered.put(*parts[0], timeout=WAIT)
                came.append(pull.take(timeout=WAIT))
            relay.swallow = True
            started = time.monotonic()
            thread = fill(offered, parts[len(came) :])
            came += pull.parts(timeout=WAIT)
            assert came == parts and time.monotonic() - started < QUICK.silence + 10
            pull.done(timeout=WAIT)
        thread.join()
        relay.close()


def test_both_sides_give_up_when_nothing_passes_any_more():
    """Each one frees what it holds once its lease is over, and says why."""
    with Wired("tcp") as wired:
        relay = Relay(wired.dial.args)
        offered = wired.sender.offer(ID, 1)
        offered.put("a", bytes(1000), timeout=WAIT)
        with wired.pull(dial=functools.partial(dial_tcp, *relay.address)) as pull:
            assert pull.take(timeout=WAIT) == ("a", bytes(1000))
            offered.put("b", bytes(1000), timeout=WAIT)
            assert pull.take(timeout=WAIT)[0] == "b"
            relay.swallow = True
            offered.put("c", bytes(1000), timeout=WAIT)
            started = time.monotonic()
            with pytest.raises(TransferFailed, match="lease: no word from the sender"):
                pull.take(timeout=WAIT)
            with pytest.raises(TransferFailed, match="lease: no word from the receiver"):
                offered.wait(timeout=WAIT)
            assert time.monotonic() - started < QUICK.lease + QUICK.silence + 10
            assert offered.held == 0
        relay.close()


def test_strangers_at_the_port():
    """Bytes that are no message, silence, and ends do not hinder others."""
    with Wired("tcp") as wired:
        wired.sender.offer(b"other", 1)
        strangers = []
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"FTX1" + b"\xff" * 60, bytes(100)):
            stranger = socket.create_connection(wired.dial.args)
            stranger.sendall(data)
            strangers.append(stranger)
        assert move(wired, PARTS) == PARTS
        for stranger in strangers:
            stranger.settimeout(WAIT)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
            stranger.close()
