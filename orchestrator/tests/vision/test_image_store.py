"""Embeddings in host memory: bounded, shared, kept for those that hold them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.engine.image_store import ImageStore
from orchestrator.engine.request import EngineFull

ROW = torch.zeros(1)


def made(value: float = 0.0):
    return lambda: torch.full((1,), value)


def never():
    raise AssertionError("made again")


def test_the_least_recently_used_goes_first():
    store = ImageStore(30)
    for key in (b"a", b"b", b"c"):
        store.hold(key, 10, made())
        store.release(key)
    store.hold(b"a", 10, never)
    store.release(b"a")
    store.hold(b"d", 10, made())
    assert (store.size, store.held, store.evictions) == (30, 10, 1)
    store.hold(b"a", 10, never), store.hold(b"c", 10, never)
    with pytest.raises(EngineFull):
        store.hold(b"b", 10, never)
    assert (store.hits, store.misses) == (3, 4)


def test_what_is_held_stays_and_overload_is_refused():
    store = ImageStore(25)
    first = store.hold(b"a", 10, made(1.0))
    store.hold(b"a", 10, never)
    store.hold(b"b", 10, made())
    with pytest.raises(EngineFull, match="images of other requests take 20 of 25 bytes"):
        store.hold(b"c", 10, never)
    store.release(b"a")
    with pytest.raises(EngineFull):
        store.hold(b"c", 10, never)
    store.release(b"b")
    store.hold(b"c", 10, made())
    assert store.hold(b"a", 10, never) is first and store.held == 20 and store.evictions == 1
    with pytest.raises(ValueError, match=r"take 26 bytes, allowed are 25 \(image_bytes\)"):
        store.hold(b"d", 26, never)
    with pytest.raises(ValueError, match="nobody holds"):
        store.release(b"c"), store.release(b"c")


def test_rows_that_cannot_be_made_leave_nothing():
    store = ImageStore(10)

    def broken():
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        store.hold(b"a", 10, broken)
    assert (store.size, store.held) == (0, 0)
    assert store.hold(b"a", 10, made(2.0)).item() == 2.0


def test_one_makes_it_and_the_others_wait():
    store, going, count = ImageStore(100), threading.Event(), []

    def slow():
        count.append(1)
        going.wait(5)
        return torch.ones(1)

    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(store.hold, b"a", 10, slow) for _ in range(4)]
        going.set()
        rows = [each.result(5) for each in waiting]
    assert len(count) == 1 and all(each is rows[0] for each in rows) and store.held == 10


def test_a_capacity_of_nothing():
    with pytest.raises(ValueError, match="capacity: got -1"):
        ImageStore(-1)
    with pytest.raises(ValueError, match="allowed are 0"):
        ImageStore(0).hold(b"a", 1, never)


class Histories(RuleBasedStateMachine):
    """Against a plain account of who holds what."""

    CAPACITY = 40

    def __init__(self) -> None:
        super().__init__()
        self.store, self.holders = ImageStore(self.CAPACITY), {}

    @staticmethod
    def size(key: int) -> int:
        return 5 + 3 * key

    @rule(key=st.integers(0, 7))
    def hold(self, key):
        grown = 0 if self.holders.get(key) else self.size(key)
        room = self.taken() + grown <= self.CAPACITY
        try:
            rows = self.store.hold(bytes([key]), self.size(key), made(float(key)))
        except EngineFull:
            assert not room
        else:
            assert room and rows.item() == key
            self.holders[key] = self.holders.get(key, 0) + 1

    @rule(data=st.data())
    def release(self, data):
        held = [key for key, count in self.holders.items() if count]
        if held:
            key = data.draw(st.sampled_from(held))
            self.store.release(bytes([key]))
            self.holders[key] -= 1

    def taken(self) -> int:
        return sum(self.size(key) for key, count in self.holders.items() if count)

    @invariant()
    def bytes_add_up(self):
        assert self.store.held == self.taken() <= self.store.size <= self.CAPACITY


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
