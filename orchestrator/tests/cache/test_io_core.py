"""The I/O process's core under random requests, loads that fail or never end, engines that vanish."""

import random

import pytest

from orchestrator.cache.host.table import HostTable
from orchestrator.cache.io import events as ev
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.core import IoCore
from orchestrator.cache.io.fetch import FetchState
from orchestrator.cache.store.base import Put

KEYS = [bytes([n]) * 32 for n in range(40)]


def test_the_answer_is_what_came_without_a_gap() -> None:
    fetch = FetchState(KEYS[:5], deadline=1.0)
    assert fetch.arrived(0, 10) and fetch.arrived(3, 13) and fetch.arrived(1, 11)
    assert fetch.ready == 2 and not fetch.complete
    assert fetch.cut() == [13]
    assert fetch.complete and not fetch.arrived(2, 12)
    assert fetch.slots == [10, 11, None, None, None]


def test_a_failure_ends_the_fetch_once_all_before_it_have_come() -> None:
    fetch = FetchState(KEYS[:4], deadline=1.0)
    assert fetch.failed(2) == []
    fetch.arrived(0, 1)
    assert not fetch.complete
    fetch.arrived(1, 2)
    assert fetch.complete and fetch.ready == 2
    assert fetch.failed(0) == [1, 2]


def test_a_deadline_cuts_and_late_blocks_stay_for_the_next() -> None:
    core = IoCore(HostTable(8), 4)
    (load,) = core.step(ev.Got(1, m.Fetch(1, KEYS[:3], b"r" * 32, 0, 2.0)), 10.0)
    assert isinstance(load, ev.Load) and [i.depth for i in load.items] == [0, 1, 2]
    assert core.next_deadline() == 12.0
    assert core.step(ev.Loaded(load.items[0], True), 10.5) == []
    assert core.step(ev.Loaded(load.items[2], True), 10.6) == []
    assert core.step(ev.Tick(), 11.9) == []
    (answer,) = core.step(ev.Tick(), 12.0)
    assert isinstance(answer, ev.Send) and len(answer.message.slots) == 1
    assert core.step(ev.Loaded(load.items[1], True), 13.0) == []
    (again,) = core.step(ev.Got(1, m.Fetch(2, KEYS[:3], b"r" * 32, 0, 2.0)), 14.0)
    assert isinstance(again, ev.Send) and len(again.message.slots) == 3


def test_an_engine_that_hangs_does_not_hold_for_ever() -> None:
    core = IoCore(HostTable(4), 2, hold_s=30.0)
    (load,) = core.step(ev.Got(1, m.Fetch(1, KEYS[:2], b"r" * 32, 0, 9.0)), 0.0)
    for item in load.items:
        core.step(ev.Loaded(item, True), 1.0)
    (answer,) = core.step(ev.Got(1, m.Reserve(2, 2)), 2.0)
    assert core.table.pinned == 2 and core.next_deadline() == 31.0
    core.step(ev.Tick(), 31.0)
    assert core.table.pinned == 0 and core.table.counts["filling"] == 2
    core.step(ev.Tick(), 32.0)
    assert core.table.counts["filling"] == 0 and core.next_deadline() is None
    core.step(ev.Got(1, m.Release(1)), 40.0)  # it wakes up
    blocks = [m.Written(slot, generation, KEYS[5], b"p" * 32, 0) for slot, generation in answer.message.slots]
    (late,) = core.step(ev.Got(1, m.Commit(2, blocks, 0, "")), 40.0)
    assert late.message.puts == ["refused", "refused"] and core.table.find(KEYS[5]) is None


def test_two_fetches_of_one_block_load_it_once() -> None:
    core = IoCore(HostTable(8), 4)
    (load,) = core.step(ev.Got(1, m.Fetch(1, KEYS[:2], b"r" * 32, 0, 9.0)), 0.0)
    assert core.step(ev.Got(2, m.Fetch(7, KEYS[:2], b"r" * 32, 0, 9.0)), 0.0) == []
    core.step(ev.Loaded(load.items[0], True), 1.0)
    answers = core.step(ev.Loaded(load.items[1], True), 1.0)
    assert {(a.client, a.message.id, len(a.message.slots)) for a in answers} == {(1, 1, 2), (2, 7, 2)}


@pytest.mark.parametrize("seed", range(25))
def test_random_life(seed: int) -> None:
    rng, slots = random.Random(seed), 16
    core = IoCore(HostTable(slots), 6)
    now, ids = 0.0, iter(range(1, 100_000))
    asked: dict[tuple[int, int], list[bytes]] = {}
    held: dict[tuple[int, int], list] = {}
    granted: dict[tuple[int, int], list] = {}
    jobs: list[ev.Action] = []

    def take(actions: list[ev.Action]) -> None:
        for action in actions:
            if not isinstance(action, ev.Send):
                jobs.append(action)
                continue
            place = (action.client, action.message.id)
            if isinstance(action.message, m.Fetched) and place in asked:
                keys = asked.pop(place)
                for key, (slot, generation) in zip(keys, action.message.slots, strict=False):
                    assert core.table.find(key) == slot and core.table.generation(slot) == generation
                held[place] = action.message.slots
            elif isinstance(action.message, m.Reserved):
                granted[place] = action.message.slots

    for _ in range(500):
        now += rng.random()
        client, id = rng.randint(1, 3), next(ids)
        what = rng.random()
        if what < 0.25:
            start = rng.randrange(30)
            keys = KEYS[start : start + rng.randint(1, 8)]
            asked[client, id] = keys
            take(core.step(ev.Got(client, m.Fetch(id, keys, b"r" * 32, 0, rng.random() * 5)), now))
        elif what < 0.35:
            take(core.step(ev.Got(client, m.Reserve(id, rng.randint(1, 5))), now))
        elif what < 0.45 and granted:
            place = rng.choice(list(granted))
            given = granted.pop(place)[: rng.randint(0, 5)]
            blocks = [m.Written(s, g, rng.choice(KEYS), b"p" * 32, 0) for s, g in given]
            take(core.step(ev.Got(place[0], m.Commit(place[1], blocks, 0, "")), now))
        elif what < 0.75 and jobs:
            job = jobs.pop(rng.randrange(len(jobs)))
            if isinstance(job, ev.Load):
                for item in rng.sample(job.items, len(job.items)):
                    take(core.step(ev.Loaded(item, rng.random() < 0.9), now))
            elif isinstance(job, ev.Persist):
                count = len(job.message.blocks)
                puts = [rng.choice(list(Put)) for _ in range(count)]
                whole = [rng.random() < 0.9 for _ in range(count)]
                take(core.step(ev.Persisted(job.client, job.message, puts, whole), now))
        elif what < 0.9 and (held or asked):
            place = rng.choice([*held, *asked])
            held.pop(place, None)
            asked.pop(place, None)
            take(core.step(ev.Got(place[0], m.Release(place[1])), now))
        elif what < 0.93:
            take(core.step(ev.Left(client), now))
            for places in (asked, held, granted):
                for place in [p for p in places if p[0] == client]:
                    del places[place]
        else:
            take(core.step(ev.Tick(), now))
        assert sum(core.table.counts.values()) == slots
        assert core.table.pinned <= slots and 0 <= core._filling <= 6
    for client in (1, 2, 3):
        take(core.step(ev.Left(client), now))
    for job in jobs:
        if isinstance(job, ev.Load):
            for item in job.items:
                core.step(ev.Loaded(item, True), now)
        elif isinstance(job, ev.Persist):
            count = len(job.message.blocks)
            core.step(ev.Persisted(job.client, job.message, [Put.STORED] * count, [True] * count), now)
    assert core.table.pinned == 0 and core.table.counts["filling"] == 0 and core._filling == 0
