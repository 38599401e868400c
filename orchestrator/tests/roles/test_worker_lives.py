"""What all workers have in common: lives, groups, and messages for another life."""

import pytest
from roles_kit import only
from worker_kit import SPEC, beats, decode_in, prefill_in, reserve

from orchestrator.roles import messages as m
from orchestrator.roles.engine_port import (
    RankDied,
    Reform,
    Reformed,
)


@pytest.mark.parametrize("core", [prefill_in("computing"), decode_in("decoding"), prefill_in("beginning")])
def test_an_engine_that_never_answers_counts_as_dead(core):
    reform = []
    for at in range(1, 60):
        core.step(m.TargetAlive("r", 1, "d", 1000, True), at / 2)
        if core.role == "decode":
            core.step(m.TokensAck("r", 1, 1), at / 2)
        reform += only(core.step(m.Tick(), at / 2), Reform)
    assert len(reform) == 1 and core.life == "reforming"
    beats(core, 30.0, core.settings.reform + 1)
    assert core.gone, "a group that does not form leaves, to be started anew"


def test_a_group_that_loses_ranks_while_it_forms_begins_again():
    core = decode_in("decoding")
    core.step(RankDied(0), 1.0)
    (reform,) = only(core.step(RankDied(1), 1.1), Reform)
    assert reform.number == 2
    core.step(Reformed(1, 7, 100.0, 0), 1.2)
    assert core.life == "reforming"
    core.step(Reformed(2, 6, 100.0, 0), 1.3)
    assert core.life == "active" and core.ranks == 6


def test_a_group_with_too_few_ranks_leaves():
    core = decode_in("decoding")
    core.step(RankDied(0), 1.0)
    core.step(Reformed(1, 3, 0.0, 0, "too few for the experts"), 1.1)
    assert not core.gone  # the failure has to be told first
    actions = core.step(m.Release("r", 1, False), 1.2)
    assert only(actions, m.Exit) and core.gone


def test_messages_for_another_life_are_refused():
    core = decode_in("reserved")
    other = m.Reserve("q", 1, 999, "entry", SPEC, (), "p", 1000, 10)
    assert core.step(other, 0.0) == [] and core.step(m.Drain("d", 2000, 1.0), 0.0) == []
    prefill = prefill_in("beginning")
    assert prefill.step(m.AssignPrefill("q", 1, 2000, "entry", SPEC, (), "d", 1000), 0.0) == []


@pytest.mark.parametrize("stopped", [0.0, 100.0])
def test_a_released_request_stays_released_while_its_messages_lie_unread(stopped):
    """Whoever was stopped reads them in any order when it goes on, its clock far ahead."""
    core = decode_in("reserved")
    core.step(m.Release("r", 1, ended=False), 1.0)
    core.step(m.Tick(), 1.5 + stopped)
    core.step(reserve(), 1.6 + stopped)
    assert not core.rows
    core.step(reserve(epoch=2), 1.7 + stopped)
    assert list(core.rows) == [("r", 2)]
