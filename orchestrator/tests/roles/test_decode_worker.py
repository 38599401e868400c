"""Decode workers: what each message does in each state, and what a wrong one does not."""

import pytest
from msgspec.structs import replace
from roles_kit import only
from worker_kit import PARTS, ROW_STATES, beats, decode_in, manifest, reserve

from orchestrator.roles import messages as m
from orchestrator.roles.engine_port import (
    DecodeDone,
    DecodeOutput,
    Drop,
    Exported,
    Load,
    Loaded,
    RankDied,
    Reformed,
    Rename,
    RunDecode,
    Thaw,
)
from orchestrator.roles.state_parts import Manifest


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("state", ROW_STATES)
def test_decode_frees_everything_in_every_state(state, ended):
    core = decode_in(state)
    in_engine = state in ("loading", "landed", "decoding", "moving")
    actions = core.step(m.Release("r", 1, ended), 1.0)
    assert not core.held and bool(only(actions, Drop)) == in_engine
    late = [
        reserve(), m.Offer("r", 1, "p", 1000, 1000, manifest()), m.Piece("r", 1, 1000, 0, PARTS[0]), Loaded("r", 1),
        DecodeDone(1, (DecodeOutput("r", 1, (8,)),)), Exported("r", 1, manifest(), PARTS), m.TokensAck("r", 1, 1),
        m.MoveTo("r", 1, 2, "d3", 1), m.Resume("r", 1, 2, 1000, 0), m.Want("r", 1, "d2", 1000, 1000, (0,)),
        m.Taken("r", 1, "d2", 1000, True), m.SourceAlive("r", 1, "p", 1000),
    ]  # fmt: skip
    if not core.gone:
        for event in late:
            found = only(core.step(event, 1.0), m.Taken)
            assert all(not t.good for t in found)
        assert not core.held


@pytest.mark.parametrize("state", ROW_STATES)
def test_decode_ends_everything_with_its_group(state):
    core = decode_in(state)
    actions = core.step(RankDied(1), 1.0)
    failed = only(actions, m.WorkFailed)
    if state == "telling":
        assert not failed and core.rows, "its tokens are here"
    elif state == "landed":
        assert not failed and not core.rows, "its entry sees that nobody goes on"
    else:
        assert failed[0].retry and not core.rows
    if state in ("reserved", "pulling", "loading"):
        assert [t.good for t in only(actions, m.Taken)] == [False]
    core.step(Reformed(1, 3, 500.0, 2), 2.0)
    assert (core.ranks, core.capacity, core.most_rows) == (3, 500, 2)


@pytest.mark.parametrize("state", ["reserved", "pulling"])
def test_decode_frees_a_reservation_whose_source_is_silent_or_gone(state):
    core = decode_in(state)
    actions = beats(core, 0.0, 6.0)
    assert only(actions, m.WorkFailed) and not core.rows
    core = decode_in(state)
    assert core.step(m.SourceGone("r", 1, "p", 999), 1.0) == []
    assert only(core.step(m.SourceGone("r", 1, "p", 1000), 1.0), m.WorkFailed)


@pytest.mark.parametrize("state", ["landed", "decoding", "moving", "telling"])
def test_decode_frees_what_its_entry_does_not_want_any_more(state):
    core = decode_in(state)
    for at in range(1, 16):
        core.step(m.TargetAlive("r", 1, "d2", 1000, True), at / 2)
        core.step(m.Tick(), at / 2)
        for run in range(core._step, core._step + 1):
            core.step(DecodeDone(run, (DecodeOutput("r", 1, (5,)),)), at / 2)
    assert not core.rows


def test_decode_takes_a_state_only_whole():
    core = decode_in("pulling")
    assert core.step(m.Piece("r", 1, 1000, 2, b"torn"), 0.1) == []
    assert core.step(m.Piece("r", 1, 1000, 99, b"?"), 0.1) == []
    assert core.step(m.Piece("r", 1, 999, 0, PARTS[0]), 0.1) == []
    for number in (6, 0, 3, 1, 5, 4, 0):
        assert only(core.step(m.Piece("r", 1, 1000, number, PARTS[number]), 0.1), Load) == []
    (want,) = only(beats(core, 0.1, 0.5), m.Want)
    assert want.parts == (2,)
    (load,) = only(core.step(m.Piece("r", 1, 1000, 2, PARTS[2]), 0.7), Load)
    assert load.parts == PARTS and load.manifest == manifest()
    actions = core.step(Loaded("r", 1), 0.8)
    assert only(actions, m.Taken)[0].good and only(actions, m.Tokens)[0].tokens == (7,) and only(actions, RunDecode)


def test_decode_gives_up_on_parts_that_never_come_whole():
    core = decode_in("pulling")
    failed = []
    for at in range(1, 30):
        core.step(m.SourceAlive("r", 1, "p", 1000), at / 2)
        failed += only(core.step(m.Tick(), at / 2), m.WorkFailed)
    assert failed and not core.rows and "7 parts" in failed[0].why


@pytest.mark.parametrize("change", [{"output": (1, 2), "tokens": 300}, {"layout": "v0"}, {"parts": ()}])
def test_decode_refuses_a_state_that_is_none(change):
    core = decode_in("reserved")
    actions = core.step(m.Offer("r", 1, "p", 1000, 1000, replace(manifest(), **change)), 0.0)
    assert only(actions, m.WorkFailed) and not only(actions, m.Taken)[0].good and not only(actions, m.Want)


def test_decode_ends_what_its_engine_cannot_load():
    core = decode_in("loading")
    actions = core.step(Loaded("r", 1, "no memory"), 0.0)
    assert only(actions, m.WorkFailed) and not only(actions, m.Tokens) and only(actions, Drop)


def test_decode_answers_a_source_by_what_it_has():
    core = decode_in("reserved")
    assert only(core.step(m.SourceAlive("r", 1, "p", 1000), 0.1), m.TargetAlive)[0].ready
    assert not only(core.step(m.SourceAlive("q", 1, "p", 1000), 0.1), m.TargetAlive)[0].ready
    core = decode_in("decoding")
    assert only(core.step(m.Offer("r", 1, "p", 1000, 1000, manifest()), 0.1), m.Taken)[0].good


def test_decode_keeps_to_its_room():
    core = decode_in("reserved")
    assert only(core.step(reserve(request="big", need=601), 0.0), m.WorkFailed)
    core.step(reserve(request="b", need=310), 0.0)
    assert only(core.step(reserve(request="c", need=280), 0.0), m.WorkFailed), "its prompt alone takes 300"
    core.capacity = 1020
    core.step(m.Release("c", 1, False), 0.0)
    core.step(reserve(2, request="c", need=310), 0.0)
    assert len(core.rows) == 3
    assert only(core.step(reserve(request="e", need=0), 0.0), m.WorkFailed)  # no row is left
    (report,) = only(core.step(m.Release("c", 1, True), 0.0), m.Report)
    assert report.room == 310 and sum(h.tokens for h in report.holding) == 710


def test_decode_repeats_what_is_not_acknowledged_and_no_more():
    core = decode_in("decoding")
    core.step(DecodeDone(1, (DecodeOutput("r", 1, (8, 9)),)), 0.1)
    core.step(m.TokensAck("r", 1, 1), 0.2)
    (again,) = only(beats(core, 0.2, 1.0), m.Tokens)[:1]
    assert (again.index, again.tokens) == (1, (8, 9))
    core.step(m.TokensAck("r", 1, 3), 1.2)
    (alive,) = only(beats(core, 1.2, 0.5), m.Tokens)
    assert (alive.index, alive.tokens) == (3, ())


def test_decode_keeps_notes_until_they_are_known():
    core = decode_in("decoding")
    (told,) = only(core.step(DecodeDone(1, (DecodeOutput("r", 1, (8, 9), notes=(b"8", b"9")),)), 0.1), m.Tokens)
    assert told.notes == (b"8", b"9")
    core.step(m.TokensAck("r", 1, 2), 0.2)
    (again,) = only(beats(core, 0.2, 1.0), m.Tokens)[:1]
    assert (again.index, again.tokens, again.notes) == (2, (9,), (b"9",))
    core.step(m.TokensAck("r", 1, 3), 1.2)
    assert not core.rows["r", 1].notes


def test_decode_treats_preemption_and_errors_as_no_end():
    for reason in ("preempted", "error"):
        core = decode_in("decoding")
        actions = core.step(DecodeDone(1, (DecodeOutput("r", 1, (), reason, "words"),)), 0.1)
        assert only(actions, m.WorkFailed)[0].retry and not only(actions, m.Tokens)


def test_decode_tells_an_end_until_it_is_known():
    core = decode_in("telling")
    told = only(beats(core, 0.0, 2.0), m.Tokens)
    assert told and all((t.index, t.tokens, t.reason) == (0, (7, 8), "stop") for t in told)
    assert core.holdings()[0].tokens == 0


def test_decode_moves_a_request_out_and_frees_it_when_it_was_taken():
    core = decode_in("moving")
    actions = core.step(DecodeDone(1, (DecodeOutput("r", 1, (8,)),)), 0.2)  # the step that was under way
    assert only(actions, m.Tokens)[0].tokens == (8,) and not only(actions, RunDecode)
    (offer,) = only(core.step(Exported("r", 1, manifest((7, 8)), PARTS), 0.3), m.Offer)
    assert offer.manifest.output == (7, 8)
    assert len(only(core.step(m.Want("r", 1, "d2", 1000, 1000, (0, 1)), 0.4), m.Piece)) == 2
    actions = core.step(m.Taken("r", 1, "d2", 1000, True), 0.5)
    assert only(actions, Drop) and only(actions, m.Exit) and core.gone


@pytest.mark.parametrize("how", ["declined", "silent", "not exported"])
def test_decode_goes_on_by_itself_when_a_move_fails(how):
    core = decode_in("moving")
    core.step(DecodeDone(1, (DecodeOutput("r", 1, (8,)),)), 0.2)
    if how == "declined":
        actions = core.step(m.Taken("r", 1, "d2", 1000, False), 0.3)
    elif how == "not exported":
        actions = core.step(Exported("r", 1, None, (), "why"), 0.3)
    else:
        core.step(Exported("r", 1, manifest((7, 8)), PARTS), 0.3)
        actions = []
        for at in range(1, 12):
            core.step(m.TokensAck("r", 1, 2), at / 2)
            actions += core.step(m.Tick(), at / 2)
    assert only(actions, Thaw) and only(actions, RunDecode)[0].requests == (("r", 1),)
    core.step(m.TokensAck("r", 1, 2), 6.0)
    wanted = only(beats(core, 6.0, 1.0), m.MoveWanted)
    assert wanted and wanted[0].number == 2


def test_decode_resumes_a_landed_copy_under_its_new_epoch():
    core = decode_in("landed")
    (landed,) = only(beats(core, 0.0, 0.5), m.Landed)
    assert landed.output == (7,)
    assert core.step(m.Resume("r", 1, 2, 999, 0), 1.0) == []
    actions = core.step(m.Resume("r", 1, 2, 1000, 0), 1.0)
    assert only(actions, Rename) == [Rename("r", 1, 2)] and set(core.rows) == {("r", 2)}
    assert only(actions, m.Tokens)[0].tokens == (7,) and only(actions, RunDecode)[0].requests == (("r", 2),)
    assert core.step(m.Resume("r", 1, 2, 1000, 0), 1.0) == []
    assert only(core.step(m.Offer("r", 1, "p", 1000, 1000, manifest()), 1.0), m.Taken)[0].good
    core.step(m.Release("r", 1, False), 1.1)
    assert core.rows, "the epoch that was released is the one before"


def test_decode_knows_that_a_prompt_ended_at_its_first_token():
    core = decode_in("reserved")
    offer = m.Offer("r", 1, "p", 1000, 1000, Manifest("toy", 300, (), False, (), "stop"))
    actions = core.step(offer, 0.0)
    assert only(actions, m.Taken)[0].good and only(actions, m.Tokens)[0].reason == "stop"
    assert not only(actions, Load) and core.rows["r", 1].state == "telling"
