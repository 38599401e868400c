"""Transfers that are agreed on through a store: whoever comes first, in whatever groups, with a device that is late."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from ep_comm import Broken, PeerTimeout, Transfer
from ep_comm.cuda.store_moves import StoreMoves, StoreMoving


class Event:
    """True after some questions."""

    def __init__(self, late: int) -> None:
        self.late = late

    def query(self) -> bool:
        self.late -= 1
        return self.late < 0

    def synchronize(self) -> None:
        self.late = 0


class Device:
    """Buffers of this process; `late` draws how late events are."""

    def __init__(self, lent: list, late) -> None:
        self._lent, self._late = lent, late
        self.copies = 0

    def lend(self, buffer):
        self._lent.append(buffer)
        return len(self._lent) - 1

    def open(self, source, lent):
        return self._lent[lent]

    def mark(self, buffer):
        return Event(self._late())

    def copy(self, to, source, after):
        self.copies += 1
        to.copy_(source)
        return Event(self._late())


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self._store, self.calls = HashStore(), 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self._store, name)


def group(ranks: int, seed: int = 0):
    draw, lent, store = random.Random(seed), [], Counting()
    made = [StoreMoves(store, r, Device(lent, lambda: draw.randrange(4))) for r in range(ranks)]
    return made, store


def bytes_of(value: int, size: int = 64) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_and_any_groups(seed):
    """Both sides split the same transfers into calls of their own."""
    draw = random.Random(seed)
    moves, _ = group(3, seed)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    transfers = [(tag, *draw.choice(pairs)) for tag in range(24)]
    given = {key: bytes_of(i + 1) for i, key in enumerate(transfers)}
    taken = {key: bytes_of(0) for key in transfers}
    calls = []
    for rank in range(3):
        for side, buffers in ((1, given), (2, taken)):
            mine = [Transfer(*key, buffers[key]) for key in transfers if key[side] == rank]
            draw.shuffle(mine)
            cut = draw.randrange(len(mine) + 1)
            calls += [(rank, part) for part in (mine[:cut], mine[cut:]) if part]
    draw.shuffle(calls)
    moving = [StoreMoving(moves[rank], part, 5.0) for rank, part in calls]
    for _ in range(100):
        draw.shuffle(moving)
        if all([m.done() for m in moving]):
            break
    assert all(m.done() for m in moving)
    assert all(torch.equal(taken[key], given[key]) for key in transfers)
    assert all(not m.under_way for m in moves)


def test_a_key_is_used_again():
    moves, _ = group(2)
    for turn in range(5):
        to = bytes_of(0)
        source = StoreMoving(moves[0], [Transfer(3, 0, 1, bytes_of(turn + 1))], 5.0)
        target = StoreMoving(moves[1], [Transfer(3, 0, 1, to)], 5.0)
        for _ in range(20):
            source.done(), target.done()
        assert source.done() and target.done() and (to == turn + 1).all()


def test_what_a_plan_costs_the_store():
    """Messages grow with calls, not with experts."""
    counts = []
    for experts in (1, 200):
        moves, store = group(2)
        for m in moves:
            m.device = Device(moves[0].device._lent, lambda: 0)
        source = StoreMoving(moves[0], [Transfer(i, 0, 1, bytes_of(1)) for i in range(experts)], 5.0)
        target = StoreMoving(moves[1], [Transfer(i, 0, 1, bytes_of(0)) for i in range(experts)], 5.0)
        for _ in range(6):
            target.done(), source.done()
        assert source.done() and target.done()
        counts.append(store.calls)
    assert counts[1] <= counts[0] + 10


def test_sizes_that_differ_break_both_sides_and_nothing_else():
    moves, _ = group(2)
    good, bad = bytes_of(0), bytes_of(0, 32)
    source = StoreMoving(moves[0], [Transfer(1, 0, 1, bytes_of(7)), Transfer(2, 0, 1, bytes_of(8))], 5.0)
    with pytest.raises(Broken, match="64 bytes"):
        target = StoreMoving(moves[1], [Transfer(1, 0, 1, bad)], 5.0)
        for _ in range(10):
            source.done(), target.done()
    with pytest.raises(Broken, match="size"):
        for _ in range(10):
            source.done()
    other = StoreMoving(moves[1], [Transfer(2, 0, 1, good)], 5.0)
    for _ in range(10):
        source.done(), other.done()
    assert source.done() and other.done() and (good == 8).all() and (bad == 0).all()


def test_nobody_comes():
    moves, _ = group(3)
    to = bytes_of(0)
    with pytest.raises(PeerTimeout) as caught:
        StoreMoving(moves[0], [Transfer(1, 0, 2, bytes_of(1)), Transfer(1, 1, 0, to)], 5.0).wait(0.05)
    assert caught.value.waiting_for == (1, 2) and not moves[0].under_way
    # The offer was taken back: who comes later waits for the next one.
    late = bytes_of(0)
    target = StoreMoving(moves[2], [Transfer(1, 0, 2, late)], 5.0)
    assert not any(target.done() for _ in range(10)) and (late == 0).all()
    source = StoreMoving(moves[0], [Transfer(1, 0, 2, bytes_of(9))], 5.0)
    for _ in range(20):
        source.done(), target.done()
    assert target.done() and source.done() and (late == 9).all()


def test_over_a_prefix_of_another_store():
    base = HashStore()
    base.set_timeout(timedelta(seconds=1))
    lent: list = []
    moves = [StoreMoves(PrefixStore("moves", base), r, Device(lent, lambda: 0)) for r in range(2)]
    to = bytes_of(0)
    target = StoreMoving(moves[1], [Transfer(0, 0, 1, to)], 5.0)
    source = StoreMoving(moves[0], [Transfer(0, 0, 1, bytes_of(4))], 5.0)
    for _ in range(10):
        source.done(), target.done()
    assert source.done() and target.done() and (to == 4).all()
