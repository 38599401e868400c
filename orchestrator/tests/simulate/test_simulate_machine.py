"""The shell of a party: lives, wake-ups, pauses, clocks."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.roles.messages import Send, Start, Tick, Wake
from orchestrator.simulate.machine import Machine
from orchestrator.simulate.network import Network
from orchestrator.simulate.queue import EventQueue


class Recorder:
    """A core that writes down what it is told, and answers from a list of actions by event type."""

    held = frozenset()

    def __init__(self, life, seen, answers):
        self.life, self.seen, self.answers = life, seen, answers

    def step(self, event, now):
        self.seen.append((self.life, event, now))
        answer = self.answers.get(type(event), [])
        return answer(now) if callable(answer) else list(answer)


def make(answers, clock=0.0):
    queue = EventQueue(Random(0))
    seen, asked, got = [], [], []
    network = Network(queue, Random(0), lambda source, target, message: got.append((source, target, message)))
    machine = Machine(
        "a",
        queue,
        network,
        lambda life: Recorder(life, seen, answers),
        lambda m, action: asked.append(action),
        clock=clock,
    )
    return queue, machine, seen, asked, got


def drain(queue, until=1e9):
    while (time := queue.next_time) is not None and time <= until:
        queue.step()


def test_it_starts_wakes_sends_and_asks():
    queue, machine, seen, asked, got = make(
        {Start: [Send("b", 1), Wake(7.0), "other"], Tick: [Send("c", 2)]}, clock=5.0
    )
    machine.start()
    machine.start()  # it runs already
    drain(queue)
    assert [(life, type(event), now) for life, event, now in seen] == [(1, Start, 5.0), (1, Tick, 7.0)]
    assert got == [("a", "b", 1), ("a", "c", 2)] and asked == ["other"] and machine.steps == 2


def test_a_later_wake_takes_the_place_of_an_earlier_one():
    queue, machine, seen, _, _ = make({Start: [Wake(1.0), Wake(3.0)], str: [Wake(0.5)]})
    machine.start()
    machine.handle("sooner")
    drain(queue)
    assert [now for _, event, now in seen if isinstance(event, Tick)] == [0.5]
    machine.core.answers[str] = [Wake(9.0)]
    machine.handle("again")
    drain(queue)
    assert [now for _, event, now in seen if isinstance(event, Tick)] == [0.5, 9.0]


def test_a_crash_ends_a_life_with_its_timers_and_messages():
    queue, machine, seen, _, _ = make({Start: lambda now: [Wake(now + 2.0)]})
    machine.start()
    machine.busy = 0.5
    machine.receive("late")
    machine.crash()
    machine.handle("nobody")
    assert not machine.up
    queue.at(1.0, machine.start)
    drain(queue)
    assert [(life, type(event)) for life, event, _ in seen] == [(1, Start), (2, Start), (2, Tick)]
    assert seen[-1][2] == 3.0


def test_a_pause_keeps_what_comes_and_wakes_late():
    queue, machine, seen, _, _ = make({Start: [Wake(1.0)]})
    machine.start()
    queue.at(0.5, machine.pause)
    queue.at(2.0, machine.receive, "m")
    queue.at(4.0, machine.go_on)
    drain(queue)
    assert [(event, now) for _, event, now in seen[1:]] == [("m", 4.0), (Tick(), 4.0)]


@pytest.mark.parametrize("rate", [0.8, 1.2])
def test_a_clock_that_drifts(rate):
    woken = []
    queue, machine, seen, _, _ = make(
        {Start: [Wake(110.0)], Tick: lambda _: woken.append(queue.now) or []}, clock=100.0
    )
    machine.start()
    machine.set_clock(rate=rate)
    drain(queue)
    assert woken == [pytest.approx(10.0 / rate)]
    assert seen[-1][2] >= 110.0


def test_a_clock_that_jumps():
    queue, machine, seen, _, _ = make({Start: [Wake(10.0)]})
    machine.start()
    queue.at(1.0, lambda: machine.set_clock(jump=30.0))
    drain(queue, 2.0)
    assert seen[-1][1] == Tick() and seen[-1][2] >= 31.0
    for bad in ({"jump": -1.0}, {"rate": 0.0}):
        with pytest.raises(ValueError, match="rate, jump"):
            machine.set_clock(**bad)


@pytest.mark.parametrize("seed", range(20))
def test_a_wake_is_never_early(seed):
    """Rounding between clocks must not wake a core a hair before its time: it would sleep on for ever."""
    random = Random(seed)
    queue, machine, seen, _, _ = make({Start: lambda now: [Wake(now + 0.1)]}, clock=random.random() * 1e5)
    machine.start()
    for n in range(30):
        wanted = machine.now + random.random()
        machine.core.answers[str] = [Wake(wanted)]
        machine.set_clock(rate=0.8 + 0.4 * random.random())
        machine.handle(f"{n}")
        drain(queue)
        assert isinstance(seen[-1][1], Tick) and seen[-1][2] >= wanted and machine.wake is None
