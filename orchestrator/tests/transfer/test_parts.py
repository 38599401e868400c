"""Parts of any sizes over each kind of link: whole, in order, once; and within the memory that is allowed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import ID, IN_STREAM, KINDS, QUICK, STREAMS, WAIT, Dialer, Wired, fill, move, parts_of

from orchestrator.transfer import Limits, TransferFailed

SIZES = st.lists(st.one_of(st.sampled_from([0, 1, 2, 127, 4095, 4096, 4097, 65537]), st.integers(0, 9000)), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(sizes=SIZES, held=st.integers(1, 20_000), window=st.integers(1, 20_000))
def test_any_sizes_within_any_memory(kind, sizes, held, window):
    parts = parts_of(sizes)
    with Wired(kind, Limits(held=held, window=window)) as wired:
        assert move(wired, parts) == parts
    assert wired.sender.held == 0


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("chop", [1, 7])
def test_bytes_that_come_a_few_at_a_time(kind, chop):
    parts = parts_of([0, 1, 33, 700])
    with Wired(kind) as wired:
        dialer = Dialer(wired.dial, [{"chop": chop}])
        assert move(wired, parts, dial=dialer) == parts
        assert dialer.links == 1


@pytest.mark.parametrize("kind", IN_STREAM)
def test_a_part_that_takes_longer_than_a_lease(kind):
    """Over a slow link, whose buffers the sender has filled long before; and again, since it broke near its end."""
    parts = parts_of([120_000])
    with Wired(kind, ring_bytes=1 << 18) as wired:
        dialer = Dialer(wired.dial, [{"chop": 4000, "pause": QUICK.lease / 100_000, "cut": 120_000}])
        started = time.monotonic()
        assert move(wired, parts, dial=dialer) == parts
        assert time.monotonic() - started > QUICK.lease * 1.1
        assert dialer.links == 2


def test_one_large_part(wired):
    """Many times the ring of shared memory and a socket's buffers."""
    parts = parts_of([3_000_001, 0, 1_500_000])
    assert move(wired, parts) == parts


def test_parts_come_before_the_last_is_there(wired):
    """The receiver has each part while the sender computes the next."""
    offered = wired.sender.offer(ID, 1)
    with wired.pull() as pull:
        for number, (name, data) in enumerate(parts_of([10, 0, 5000])):
            with pytest.raises(TimeoutError, match=f"part {number}"):
                pull.take(timeout=0.02)
            offered.put(name, bytearray(data), timeout=WAIT)
            assert pull.take(timeout=WAIT) == (name, data)
        with pytest.raises(TimeoutError):
            pull.take(timeout=0.02)
        with pytest.raises(ValueError, match="good: got True after 3 parts"):
            pull.done(timeout=WAIT)
        offered.finish()
        assert pull.take(timeout=WAIT) is None and pull.take(timeout=0) is None
        with pytest.raises(TimeoutError, match="not concluded"):
            offered.wait(timeout=0.02)
        pull.done(timeout=WAIT)
    offered.wait(timeout=WAIT)
    with pytest.raises(ValueError, match="no part behind"):
        offered.put("late", b"", timeout=WAIT)


def test_a_buffer_may_change_behind_put(wired):
    offered, data = wired.sender.offer(ID, 1), bytearray(b"before")
    offered.put("a", memoryview(data), timeout=WAIT)
    data[:] = b"behind"
    with wired.pull() as pull:
        assert pull.take(timeout=WAIT) == ("a", b"before")


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_receiver_bounds_both_sides(kind):
    """Nobody holds more than allowed, however long the receiver's owner is away, and nothing is lost by it."""
    limits, parts = Limits(held=5000, window=3000), parts_of([1000] * 40)
    with Wired(kind, limits) as wired:
        offered = wired.sender.offer(ID, 1)
        thread = fill(offered, parts)
        with wired.pull() as pull:
            came = []
            for _ in range(2):
                time.sleep(QUICK.silence * 1.2)
                assert offered.held == 5000 and pull.waiting == 3000
                came.append(pull.take(timeout=WAIT))
            while (part := pull.take(timeout=WAIT)) is not None:
                assert offered.held <= 5000 and pull.waiting <= 3000
                came.append(part)
            assert came == parts
            pull.done(timeout=WAIT)
        thread.join()


def test_a_full_sender_gives_up_in_time_and_goes_on(wired):
    wired.sender._limits = Limits(held=100)
    offered = wired.sender.offer(ID, 1)
    offered.put("a", bytes(60), timeout=0)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="not taken 60 bytes"):
        offered.put("b", bytes(60), timeout=0.1)
    assert time.monotonic() - started < 10 and offered.held == 60 and offered.count == 1
    with wired.pull() as pull:
        assert pull.take(timeout=WAIT) == ("a", bytes(60))
        offered.put("b", bytes(60), timeout=WAIT)
        assert pull.take(timeout=WAIT) == ("b", bytes(60))


def test_many_handoffs_at_once(wired):
    """Each receiver gets its own, in whatever order they are taken."""
    parts = {bytes([n]): parts_of([n * 100, 1, n], seed=n) for n in range(6)}
    offers = {key: wired.sender.offer(key, 3) for key in parts}
    pulls = {key: wired.pull(key, 3) for key in reversed(parts)}
    for number in range(3):
        for key, offered in offers.items():
            offered.put(*parts[key][number], timeout=WAIT)
    for key, pull in pulls.items():
        offers[key].finish()
        assert list(pull.parts(timeout=WAIT)) == parts[key]
        pull.done(timeout=WAIT)
        pull.close()
        pull.close()
        with pytest.raises(TransferFailed, match="closed"):
            pull.take(timeout=0)
    assert all(offered.outcome.good for offered in offers.values())
