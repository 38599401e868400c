"""States that are fetched beside the messages."""

import pytest
from msgspec.structs import replace
from roles_kit import image, only
from worker_kit import JOB_STATES, assign, beats, decode_in, manifest, prefill_in

from orchestrator.roles import Encoder, EncoderOptions, Prefill, PrefillOptions, Settings
from orchestrator.roles import messages as m
from orchestrator.roles.engine_port import (
    Began,
    Drop,
    Encode,
    Expect,
    RankDied,
    Withdraw,
)
from orchestrator.roles.state_parts import Manifest


def test_a_ticket_is_told_at_once_and_again():
    core = Prefill("p", 1, PrefillOptions(most=3), Settings())
    core.step(m.Start(), 0.0)
    (alive,) = only(core.step(assign(), 0.0), m.SourceAlive)
    assert alive.ticket == b"", "nothing has begun"
    (alive,) = only(core.step(Began("r", 1, 40, ticket=b"there"), 0.1), m.SourceAlive)
    assert alive.ticket == b"there"
    assert all(alive.ticket == b"there" for alive in only(beats(core, 0.1, 1.0), m.SourceAlive))


@pytest.mark.parametrize("state", JOB_STATES)
def test_what_an_export_left_behind_is_withdrawn(state):
    core = prefill_in(state)
    actions = core.step(m.Release("r", 1, True), 1.0)
    assert bool(only(actions, Withdraw)) == (state in ("exporting", "offering"))
    if state == "exporting":  # behind what undoes the export
        assert [type(a) for a in actions if isinstance(a, Drop | Withdraw)] == [Drop, Withdraw]


def test_a_state_that_was_taken_is_withdrawn():
    core = prefill_in("offering")
    (withdraw,) = only(core.step(m.Taken("r", 1, "d", 1000, True), 1.0), Withdraw)
    assert withdraw == Withdraw("r", 1)


def test_a_state_is_expected_once():
    core = decode_in("reserved")
    assert not only(core.step(m.SourceAlive("r", 1, "p", 1000), 0.1), Expect)
    assert not only(core.step(m.SourceAlive("r", 1, "p", 999, b"there"), 0.1), Expect), "of another life"
    actions = core.step(m.SourceAlive("r", 1, "p", 1000, b"there"), 0.1)
    assert only(actions, Expect) == [Expect("r", 1, b"there")] and only(actions, m.TargetAlive)[0].ready
    assert not only(core.step(m.SourceAlive("r", 1, "p", 1000, b"there"), 0.2), Expect)


@pytest.mark.parametrize("how", ["released", "silent", "gone", "bad offer", "ended", "group"])
def test_what_was_expected_is_dropped_with_its_row(how):
    core = decode_in("reserved")
    core.step(m.SourceAlive("r", 1, "p", 1000, b"there"), 0.1)
    if how == "released":
        actions = core.step(m.Release("r", 1, True), 0.2)
    elif how == "silent":
        actions = beats(core, 0.1, 7.0)
    elif how == "gone":
        actions = core.step(m.SourceGone("r", 1, "p", 1000), 0.2)
    elif how == "bad offer":
        actions = core.step(m.Offer("r", 1, "p", 1000, 1000, replace(manifest(), layout="v0")), 0.2)
    elif how == "ended":
        ended = Manifest("toy", 300, (7,), False, (), "stop")
        actions = core.step(m.Offer("r", 1, "p", 1000, 1000, ended), 0.2)
    else:
        actions = core.step(RankDied(0), 0.2)
    assert only(actions, Drop) == [Drop("r", 1)]


def test_a_state_in_parts_that_was_expected_is_dropped_too():
    core = decode_in("reserved")
    core.step(m.SourceAlive("r", 1, "p", 1000, b"there"), 0.1)
    core.step(m.Offer("r", 1, "p", 1000, 1000, manifest()), 0.1)
    assert core.rows["r", 1].state == "pulling"
    assert only(core.step(m.Release("r", 1, True), 0.2), Drop)


def test_an_encoder_is_told_whom_to_ask():
    core = Encoder("e", 1, EncoderOptions(), Settings())
    core.step(m.Start(), 0.0)
    (encode,) = only(core.step(m.AssignImage("r", 1, 1000, "front", image("x")), 0.0), Encode)
    assert encode.entry == "front"
