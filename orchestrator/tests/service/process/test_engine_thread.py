"""Commands in order, answers back, and what follows when a port raises or hangs."""

import queue
import threading

import pytest
from service_kit_process import LONG, ScriptedPort, sound, until

from orchestrator.roles.engine_port import (
    Began,
    Begin,
    Drop,
    Dropped,
    PrefillDone,
    RankDied,
    Reform,
    Reformed,
    RunPrefill,
)
from orchestrator.roles.messages import RequestSpec
from orchestrator.service.process import engine_thread
from orchestrator.service.process.engine_thread import EngineThread

SPEC = RequestSpec((1, 2, 3), 4)


class Run:
    def __init__(self, answer=None):
        self.port = ScriptedPort(answer)
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.failed: list[str] = []
        self.thread = EngineThread(self.port, self.answers.put, self.failed.append)
        self.thread.start()

    def next(self):
        return self.answers.get(timeout=LONG)


@pytest.fixture
def start():
    runs = []

    def start(answer=None):
        runs.append(Run(answer))
        return runs[-1]

    yield start
    for run in runs:
        assert run.thread.close(LONG)


def test_in_order_and_in_its_own_thread(start):
    run = start()
    commands = [Begin("a", 1, SPEC), RunPrefill(1, ()), Drop("a", 1), Begin("b", 1, SPEC)]
    for command in commands:
        run.thread.do(command)
    assert [type(run.next()) for _ in commands] == [Began, PrefillDone, Dropped, Began]
    assert run.port.commands == commands and run.port.threads == {"engine"}
    assert run.thread.steps == 1


def test_functions_in_order_with_commands(start):
    run = start()
    run.thread.do(Begin("a", 1, SPEC))
    run.thread.call(lambda: run.port.pixels("d", b"x"))
    run.thread.do(Drop("a", 1))
    run.next(), run.next()
    assert run.port.pictures == [("d", b"x")]


def test_answers_without_a_command(start):
    run = start()
    run.port._answers.append(Began("late", 1, 0))
    assert run.next() == Began("late", 1, 0)


def test_a_port_that_tells_when_it_has_answers(monkeypatch):
    monkeypatch.setattr(engine_thread, "IDLE", LONG)
    port, answers, listeners = ScriptedPort(), queue.SimpleQueue(), []
    port.listen = listeners.append
    thread = EngineThread(port, answers.put, lambda why: None)
    thread.start()
    try:
        for number in range(20):
            port._answers.append(Began("late", number, 0))
            listeners[0]()
            assert answers.get(timeout=LONG / 2) == Began("late", number, 0)
    finally:
        assert thread.close(LONG)


def test_waiting(start):
    gate = threading.Event()
    run = start(lambda c: gate.wait(LONG) and sound(c))
    assert run.thread.waiting_since() is None
    run.thread.do(Begin("a", 1, SPEC))
    since = until(run.thread.waiting_since)
    run.thread.do(Begin("b", 1, SPEC))
    assert run.thread.waiting_since() == since
    gate.set()
    until(lambda: run.thread.waiting_since() is None)


def test_a_failure_ends_the_group(start):
    def answer(c):
        if isinstance(c, RunPrefill):
            raise RuntimeError("torn")
        return sound(c)

    run = start(answer)
    run.thread.do(Begin("a", 1, SPEC))
    run.next()
    run.thread.do(RunPrefill(1, ()))
    assert run.next() == RankDied(0)
    run.thread.do(Begin("a", 2, SPEC))  # before the core has heard of it
    run.thread.do(Reform(1))
    run.thread.do(Begin("a", 3, SPEC))
    assert run.next() == Reformed(1, 1, 1000.0, 4)
    assert run.next() == Began("a", 3, 0)
    assert Begin("a", 2, SPEC) not in run.port.commands and not run.failed


def test_a_failure_of_answers(start):
    run = start()
    answers, run.port.answers = run.port.answers, lambda: 1 / 0
    assert run.next() == RankDied(0)
    run.port.answers = answers
    run.thread.do(Reform(1))
    assert isinstance(run.next(), Reformed)


def test_a_failure_while_it_forms_anew(start):
    run = start(lambda c: 1 / 0)
    run.thread.do(Begin("a", 1, SPEC))
    assert run.next() == RankDied(0)
    run.thread.do(Reform(1))
    until(lambda: run.failed)
    assert "Reform" in run.failed[0]


def test_a_failure_again_and_again(start):
    def answer(c):
        if isinstance(c, Begin):
            raise RuntimeError("torn")
        return sound(c)

    run = start(answer)
    for number in range(1, 3):
        run.thread.do(Begin("a", number, SPEC))
        assert run.next() == RankDied(0)
        run.thread.do(Reform(number))
        assert isinstance(run.next(), Reformed)
    run.thread.do(Begin("a", 3, SPEC))
    until(lambda: run.failed)
    assert run.thread.failures == 3


def test_a_hang_that_ends_after_the_group(start):
    """The core has given the group up; what the old command brings belongs to nobody."""
    gate = threading.Event()

    def answer(c):
        if isinstance(c, RunPrefill):
            gate.wait(LONG)
        return sound(c)

    run = start(answer)
    run.thread.do(RunPrefill(1, ()))
    run.thread.do(Begin("a", 1, SPEC))
    until(lambda: run.port.commands)
    run.thread.do(Reform(1))
    run.thread.do(Begin("b", 1, SPEC))
    gate.set()
    assert [run.next(), run.next()] == [Reformed(1, 1, 1000.0, 4), Began("b", 1, 0)]


def test_a_failure_after_the_group_was_given_up(start):
    gate = threading.Event()

    def answer(c):
        if isinstance(c, RunPrefill):
            gate.wait(LONG)
            raise RuntimeError("torn")
        return sound(c)

    run = start(answer)
    run.thread.do(RunPrefill(1, ()))
    until(lambda: run.port.commands)
    run.thread.do(Reform(1))
    gate.set()
    assert run.next() == Reformed(1, 1, 1000.0, 4)
    assert not run.failed


def test_close_while_it_is_at_work():
    gate = threading.Event()
    run = Run(lambda c: gate.wait(LONG) and sound(c))
    run.thread.do(Begin("a", 1, SPEC))
    until(lambda: run.port.commands)
    assert not run.thread.close(0.05)
    gate.set()
    assert run.thread.close(LONG)
