"""A group's life and the routing of its requests, without processes."""

from __future__ import annotations

import pytest

from orchestrator.cluster.messages import Broke, Did, Do, Failed, Form, Serving, Up
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.workers import GONE
from orchestrator.roles.engine_port import (
    DecodeDone,
    DecodeOutput,
    PrefillDone,
    Reform,
    RunDecode,
    RunPrefill,
)
from orchestrator.service.ep.group import Group
from orchestrator.service.ep.routes import Routes
from orchestrator.service.ep.runs import Runs


class Processes:
    """Numbers and letters to them."""

    def __init__(self):
        self.pids, self.places, self.sent, self.killed = [], [], [], []

    def start_at(self, place):
        self.places.append(place)
        self.pids.append(100 + len(self.pids))
        return len(self.pids) - 1

    def send(self, process, message):
        self.sent.append((process, message))

    def kill(self, process):
        self.killed.append(process)

    def links(self, epoch, ranks):
        return f"links {epoch} {ranks}"


class Case:
    """A group of 2 of 8 experts, with so many slots a rank."""

    def __init__(self, slots=5):
        self.processes, self.now, self.died, self.formed = Processes(), 0.0, [], 0
        options = EpOptions(2, slots=slots, timeout=10.0)
        self.group = Group(self.processes, options, 8, 100.0, self.died.append, self._formed, lambda: self.now)
        self.group.start()

    def _formed(self):
        self.formed += 1

    def up(self, *processes):
        for process in processes:
            self.group.take(process, Up(100 + process, 0, "layout"))

    def serve(self):
        for process in self.group.members:
            self.group.take(process, Serving(self.group.epoch, 0.0, 0, 0))

    def forms(self):
        return [(process, m.members, m.links) for process, m in self.processes.sent if isinstance(m, Form)]

    @property
    def phase(self):
        return self.group.phase


@pytest.fixture
def case():
    made = Case()
    made.up(0, 1)
    made.serve()
    assert (made.phase, made.formed, made.group.ranks, made.group.layout) == ("serving", 1, 2, "layout")
    assert made.processes.places == [0, 1] and made.group.pids() == [100, 101]
    made.processes.sent.clear()
    return made


def broke(case, process):
    case.group.take(process, Broke(case.group.epoch, "a peer is gone", (0,)))


def test_the_dead_is_replaced_and_the_other_stays(case):
    case.group.take(0, GONE)
    assert (case.phase, case.died) == ("broken", [0]) and not case.processes.sent
    broke(case, 1)
    case.group.reform(1)
    assert case.processes.places == [0, 1, 0] and not case.forms()
    case.up(2)
    assert case.phase == "forming" and case.forms() == [(2, (0, 1), "links 2 2"), (1, (0, 1), "links 2 2")]
    assert [m for p, m in case.processes.sent if p == 1] == [Do(1, Reform(1)), case.processes.sent[-1][1]]
    case.group.take(1, Serving(1, 0.0, 0, 0))  # of the epoch before
    assert case.phase == "forming"
    case.serve()
    assert (case.phase, case.group.members, case.formed) == ("serving", (2, 1), 2)
    assert not case.processes.killed and case.died == [0]


def test_one_that_is_silent_is_ended(case):
    """A rank that hangs: the other one says so, and there is no answer from it."""
    broke(case, 1)
    assert case.died == [0]
    case.group.reform(1)
    assert case.processes.places == [0, 1] and case.phase == "loading"
    case.now = 10.5
    case.group.tick()
    assert not case.processes.killed
    case.now = 11.5
    case.group.tick()
    assert case.processes.killed == [0] and case.processes.places == [0, 1, 0]
    case.group.take(0, GONE)
    case.up(2)
    case.serve()
    assert (case.phase, case.group.members) == ("serving", (2, 1))


def test_all_broke_and_none_died(case):
    broke(case, 0)
    broke(case, 1)
    case.group.reform(1)
    case.group.tick()
    assert case.processes.places == [0, 1] and case.phase == "forming"
    case.serve()
    assert (case.phase, case.group.members) == ("serving", (0, 1))


def test_given_up_without_a_sign(case):
    case.group.reform(3)
    assert case.processes.killed == [0, 1] and case.processes.places == [0, 1, 0, 1] and not case.died
    case.group.reform(4)  # once more, while that is under way
    case.up(2, 3)
    case.serve()
    assert (case.phase, case.group.number, case.group.members) == ("serving", 4, (2, 3))
    assert case.processes.killed == [0, 1]


def test_a_death_while_it_forms(case):
    case.group.take(0, GONE)
    broke(case, 1)
    case.group.reform(1)
    case.up(2)
    case.group.take(1, GONE)
    assert (case.phase, case.died) == ("broken", [0, 1])
    broke(case, 2)
    case.group.reform(2)
    case.up(3)
    case.serve()
    assert (case.phase, case.group.members, case.group.number) == ("serving", (2, 3), 2)


def test_too_few_ranks(case):
    """A process that cannot be started is tried once a group; one rank of 5 slots cannot hold 8 experts."""
    case.group.take(0, GONE)
    broke(case, 1)
    case.group.reform(1)
    case.group.take(2, Failed("no such file"))
    case.group.take(2, GONE)
    assert case.phase == "useless" and case.processes.places == [0, 1, 0] and case.formed == 2
    assert case.group.why == "1 ranks of 5 slots cannot hold 8 experts: no such file"


def test_those_that_are_left_go_on():
    case = Case(slots=8)
    case.up(0, 1)
    case.serve()
    case.group.take(0, GONE)
    broke(case, 1)
    case.group.reform(1)
    case.now = 101.0  # the new one does not come up
    case.group.tick()
    case.group.tick()
    assert case.processes.killed == [2] and case.forms()[-1] == (1, (1,), "links 2 1")
    case.serve()
    assert (case.phase, case.group.ranks, case.group.members) == ("serving", 1, (1,))


def test_ranks_that_do_not_form(case):
    case.group.take(0, GONE)
    broke(case, 1)
    case.group.reform(1)
    case.up(2)
    case.group.take(2, Serving(2, 0.0, 0, 0))
    case.now = 101.0
    case.group.tick()
    assert case.processes.killed == [1] and (case.phase, case.died) == ("broken", [0, -1])


def test_answers_of_an_earlier_group_are_dropped(case):
    did = Did(0, (), 1, 0, 0)
    assert case.group.take(0, did) is did
    case.group.take(0, GONE)
    assert case.group.take(1, did) is None
    broke(case, 1)
    case.group.reform(1)
    case.up(2)
    case.serve()
    assert case.group.take(1, did) is None and case.group.take(1, Did(1, (), 2, 0, 0)) is not None


def test_routes():
    routes = Routes()
    routes.restart((4, 7))
    keys = [(name, 1) for name in "abcd"]
    assert [routes.give(key, tokens) for key, tokens in zip(keys, (9, 1, 1, 1), strict=True)] == [4, 7, 7, 4]
    assert routes.give(("a", 1), 2) == 4  # it stays
    assert routes.split([*keys, ("x", 1)]) == {4: [("a", 1), ("d", 1)], 7: [("b", 1), ("c", 1)]}
    assert routes.rename(("a", 1), ("a", 2)) == 4 and routes.find(("a", 1)) is None
    assert routes.rename(("x", 1), ("x", 2)) is None and routes.forget(("x", 1)) is None
    assert routes.forget(("a", 2)) == 4 and routes.give(("e", 1), 1) == 4
    for key in [("b", 1), ("c", 1), ("d", 1), ("e", 1)]:
        routes.forget(key)
    assert len(routes) == 0 and routes.give(("f", 1), 0) == 4 and routes.give(("g", 1), 0) == 7


def test_runs():
    runs = Runs()
    assert runs.begin(RunDecode(1, ()), (), 0.0) == DecodeDone(1, ())
    assert runs.begin(RunDecode(2, ()), (4, 7), 0.0) is None
    assert runs.begin(RunPrefill(2, ()), (4, 7), 1.0) is None
    one, two = DecodeOutput("a", 1, (5,)), DecodeOutput("b", 1, (), "stop")
    assert runs.take(4, DecodeDone(2, (one,)), 2.0) is None
    assert runs.take(4, DecodeDone(2, (one,)), 2.0) is None  # twice
    assert runs.take(4, PrefillDone(2, 0.0, ahead=(("d", 1, 700),)), 2.5) is None
    assert runs.take(7, PrefillDone(2, 0.0, failed=(("c", 1, "why"),), ahead=(("e", 3, 9),)), 3.0) == PrefillDone(
        2, 2.0, 0, (("c", 1, "why"),), (("d", 1, 700), ("e", 3, 9))
    )
    assert runs.take(7, DecodeDone(2, (two,)), 4.0) == DecodeDone(2, (one, two))
    assert runs.take(7, DecodeDone(2, (two,)), 5.0) is None
    runs.begin(RunDecode(3, ()), (4,), 0.0)
    runs.clear()
    assert runs.take(4, DecodeDone(3, ()), 1.0) is None
