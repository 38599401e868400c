"""Encoder, prefill and decode workers: what each message does in each state, and what a wrong one does not."""

import pytest
from msgspec.structs import replace
from roles_kit import image, only

from orchestrator.roles import Decode, DecodeOptions, Encoder, EncoderOptions, Prefill, PrefillOptions, Settings
from orchestrator.roles import messages as m
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    DecodeOutput,
    Drop,
    Encode,
    EncodeDone,
    Expect,
    Export,
    Exported,
    Load,
    Loaded,
    PrefillDone,
    RankDied,
    Reform,
    Reformed,
    Rename,
    RunDecode,
    RunPrefill,
    Thaw,
    Withdraw,
)
from orchestrator.roles.state_parts import KINDS, Manifest, checksum_of, part_of

SPEC = m.RequestSpec(tuple(range(300)), 50, hit=40)
PARTS = tuple(f"{kind} rows".encode() for kind in KINDS)


def manifest(output=(7,), **more):
    return Manifest("toy", 300 + max(0, len(output) - 1), output, False, tuple(map(part_of, KINDS, PARTS)), **more)


def beats(core, start, seconds):
    actions, at = [], start
    while at < start + seconds:
        at += 0.5
        actions += core.step(m.Tick(), at)
    return actions


# Prefill


def assign(epoch=1, **more):
    options = {"target": "d", "target_incarnation": 1000} | more
    return m.AssignPrefill("r", epoch, 1000, "entry", SPEC, (), **options)


def prefill_in(state):
    core = Prefill("p", 1, PrefillOptions(most=3), Settings())
    core.step(m.Start(), 0.0)
    embeddings = (m.Embedding("x", "e", 1000),) if state == "fetching" else ()
    core.step(assign(embeddings=embeddings), 0.0)
    if state in ("computing", "exporting", "offering"):
        core.step(Began("r", 1, 40), 0.0)
    if state in ("exporting", "offering"):
        core.step(PrefillDone(1, 0.1), 0.0)
    if state == "offering":
        core.step(Exported("r", 1, manifest(), PARTS), 0.0)
    assert core.jobs["r", 1].state == state
    return core


JOB_STATES = ["fetching", "beginning", "computing", "exporting", "offering"]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("state", JOB_STATES)
def test_prefill_frees_everything_in_every_state(state, ended):
    core = prefill_in(state)
    actions = core.step(m.Release("r", 1, ended), 1.0)
    assert not core.held and bool(only(actions, Drop)) == (state in ("beginning", "computing", "exporting"))
    for late in (Began("r", 1, 0), PrefillDone(1, 0.1), Exported("r", 1, manifest(), PARTS), assign()):
        assert not [a for a in core.step(late, 1.0) if not isinstance(a, m.Send | m.Wake)]
    assert not core.held
    assert bool(core.step(assign(2), 1.0) and core.jobs) is not ended  # a later epoch may come unless it ended


@pytest.mark.parametrize("state", JOB_STATES)
def test_prefill_ends_everything_with_its_group(state):
    core = prefill_in(state)
    actions = core.step(RankDied(0), 1.0)
    assert only(actions, m.WorkFailed)[0].retry and only(actions, Reform) and core.life == "reforming"
    assert only(actions, m.Report)[0].room == 0.0 and core.incarnation == 1001
    assert core.step(assign(2), 1.0) == []  # meant for the group before
    core.step(Reformed(1, 1, 0.0, 0), 2.0)
    assert core.life == "active"
    assert only(beats(core, 2.0, 1.0), m.WorkFailed)
    core.step(m.Release("r", 1, False), 3.0)
    assert not core.held


@pytest.mark.parametrize("state", JOB_STATES)
def test_prefill_gives_up_when_its_target_is_silent(state):
    core = prefill_in(state)
    actions = beats(core, 0.0, 6.0)
    assert only(actions, m.WorkFailed) and not core.jobs
    assert only(beats(core, 6.0, 10.0), m.WorkFailed)
    assert not core.held, "its entry is gone, too"


def test_prefill_is_kept_by_a_target_that_waits():
    core = prefill_in("computing")
    for second in range(1, 12):
        core.step(m.TargetAlive("r", 1, "d", 1000, True), float(second))
        beats(core, second, 0.5)
    assert core.jobs
    core.step(m.TargetAlive("r", 1, "other", 1000, True), 12.0)
    core.step(m.TargetAlive("r", 1, "d", 1000, False), 16.0)  # it has no place for it
    beats(core, 16.0, 1.0)
    assert not core.jobs


def test_prefill_runs_steps_until_the_prompt_is_done():
    core = prefill_in("computing")
    core.step(assign(1, target="d2") if False else m.AssignPrefill("q", 1, 1000, "entry", SPEC, (), "d", 1000), 0.0)
    actions = core.step(Began("q", 1, 0), 0.0)
    assert not only(actions, RunPrefill)  # one step at a time
    actions = core.step(PrefillDone(1, 0.5), 0.5)
    assert only(actions, Export) == [Export("r", 1)]
    (run,) = only(actions, RunPrefill)
    assert [(c.request, c.start, c.count, c.final) for c in run.chunks] == [("q", 0, 300, True)]
    assert core.step(PrefillDone(1, 0.5), 0.6) == []  # an answer that came twice


def test_prefill_tells_of_requests_that_fail_in_a_step():
    core = prefill_in("computing")
    actions = core.step(PrefillDone(1, 0.5, failed=(("r", 1, "NaN"),)), 0.5)
    assert only(actions, m.WorkFailed)[0].why == "NaN" and only(actions, Drop)


@pytest.mark.parametrize(("computed", "why"), [(300, ""), (-1, ""), (0, "no memory")])
def test_prefill_believes_no_impossible_hit(computed, why):
    core = prefill_in("beginning")
    assert only(core.step(Began("r", 1, computed, why), 0.0), m.WorkFailed)


def test_prefill_sends_what_is_asked_for_until_it_was_taken():
    core = prefill_in("offering")
    offer = only(beats(core, 0.0, 0.5), m.Offer)[0]
    assert offer.manifest == manifest() and offer.target_incarnation == 1000
    pieces = only(core.step(m.Want("r", 1, "d", 1000, 1000, (1, 3, 99)), 1.0), m.Piece)
    assert [(p.part, p.payload) for p in pieces] == [(1, PARTS[1]), (3, PARTS[3])]
    assert only(core.step(m.Want("r", 1, "d", 1000, 999, (1,)), 1.0), m.Piece) == []
    assert only(core.step(m.Want("r", 1, "x", 1000, 1000, (1,)), 1.0), m.Piece) == []
    core.step(m.Taken("r", 1, "d", 1000, True), 2.0)
    assert not core.held
    assert core.step(m.Want("r", 1, "d", 1000, 1000, (1,)), 2.0) == []


def test_prefill_fetches_embeddings_and_checks_them():
    core = prefill_in("fetching")
    assert only(core.step(m.EmbeddingPiece("r", 1, "x", 1, b"torn"), 0.1), Begin) == []
    assert only(beats(core, 0.1, 0.5), m.WantEmbedding)
    (begin,) = only(core.step(m.EmbeddingPiece("r", 1, "x", checksum_of(b"rows"), b"rows"), 1.0), Begin)
    assert begin.embeddings == (("x", b"rows"),)
    core = prefill_in("fetching")
    assert only(core.step(m.EmbeddingPiece("r", 1, "x", 0, b""), 0.1), m.WorkFailed)


def test_prefill_takes_nothing_beyond_its_most():
    core = Prefill("p", 1, PrefillOptions(most=2, work=100.0), Settings())
    for name in "ab":
        core.step(m.AssignPrefill(name, 1, 1000, "entry", SPEC, (), "d", 1000), 0.0)
    (report,) = only(core.step(Began("b", 1, 0), 0.0), m.Report)
    assert report.room == 0.0 and [h.request for h in report.holding] == ["a", "b"]


def test_prefill_refuses_new_work_while_it_drains():
    core = Prefill("p", 1, None, Settings())
    core.step(assign(), 0.0)
    core.step(m.Drain("p", 1000, 60.0), 0.0)
    core.step(m.Drain("p", 999, 0.0), 0.0)
    order = m.AssignPrefill("q", 1, 1000, "entry", SPEC, (), "d", 1000)
    assert only(core.step(order, 0.0), m.WorkFailed) and not core.gone
    core.step(m.Release("q", 1, False), 0.1)
    actions = core.step(m.Release("r", 1, True), 0.1)
    assert only(actions, m.Exit) and {g.worker for g in only(actions, m.Gone)} == {"p"} and core.gone
    assert core.step(assign(), 1.0) == []


def test_prefill_hands_back_what_is_left_when_the_grace_is_over():
    core = prefill_in("beginning")
    core.step(m.Drain("p", 1000, 1.0), 0.0)
    core.step(m.TargetAlive("r", 1, "d", 1000, True), 0.5)
    assert only(beats(core, 0.5, 1.0), m.WorkFailed)


# Decode


def reserve(epoch=1, request="r", need=400, **more):
    options = {"source": "p", "source_incarnation": 1000} | more
    return m.Reserve(request, epoch, 1000, "entry", SPEC, (), need=need, **options)


def decode_in(state):
    core = Decode("d", DecodeOptions(1000, 3, "toy"), 1, Settings())
    core.step(m.Start(), 0.0)
    core.step(reserve(moving=state == "landed"), 0.0)
    if state == "reserved":
        return core
    core.step(m.Offer("r", 1, "p", 1000, 1000, manifest()), 0.0)
    if state != "pulling":
        for number, payload in enumerate(PARTS):
            core.step(m.Piece("r", 1, 1000, number, payload), 0.0)
    if state not in ("pulling", "loading"):
        core.step(Loaded("r", 1), 0.0)
    if state == "moving":
        core.step(m.Drain("d", 1000, 0.0), 0.0)
        core.step(m.MoveTo("r", 1, 1, "d2", 1000), 0.1)
    if state == "telling":
        core.step(DecodeDone(1, (DecodeOutput("r", 1, (8,), "stop"),)), 0.0)
    assert core.rows["r", 1].state == state
    return core


ROW_STATES = ["reserved", "pulling", "loading", "landed", "decoding", "moving", "telling"]


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


# Encoder


def ask(epoch=1, name="x", request="r", patches=10):
    return m.AssignImage(request, epoch, 1000, "entry", image(name, patches))


def test_encoder_encodes_an_image_once_and_serves_whoever_asks():
    core = Encoder("e", 1, EncoderOptions(kept=0), Settings())
    assert only(core.step(ask(), 0.0), Encode)
    assert not only(core.step(ask(request="q"), 0.0), Encode)
    assert not only(core.step(ask(), 0.0), Encode)
    ready = only(core.step(EncodeDone("x", b"rows"), 0.1), m.ImageReady)
    assert {r.request for r in ready} == {"r", "q"}
    assert only(core.step(ask(), 0.2), m.ImageReady)
    (piece,) = only(core.step(m.WantEmbedding("r", 1, "x", "p", 1000), 0.2), m.EmbeddingPiece)
    assert piece.payload == b"rows" and piece.checksum == checksum_of(b"rows")
    assert only(core.step(m.WantEmbedding("r", 1, "y", "p", 1000), 0.2), m.EmbeddingPiece)[0].payload == b""
    core.step(m.Release("r", 1, True), 0.3)
    assert core.embeddings and core.held == {("q", 1)}
    core.step(m.Release("q", 1, True), 0.3)
    assert not core.embeddings  # the budget is 0


def test_encoder_keeps_within_its_budget_the_latest():
    core = Encoder("e", 1, EncoderOptions(kept=8), Settings())
    for number, name in enumerate("abc"):
        core.step(ask(name=name, request=f"r{name}"), number)
        core.step(EncodeDone(name, b"4444"), number)
    for name in "abc":
        core.step(m.Release(f"r{name}", 1, True), 5.0)
    assert list(core.embeddings) == ["b", "c"]


def test_encoder_tells_of_images_that_give_nothing():
    core = Encoder("e", 1, None, Settings())
    core.step(ask(), 0.0)
    core.step(ask(request="q"), 0.0)
    failed = only(core.step(EncodeDone("x", b"", "too large"), 0.1), m.WorkFailed)
    assert {f.request for f in failed} == {"r", "q"} and "too large" in failed[0].why


def test_encoder_frees_and_ends_in_every_state():
    for done in (False, True):
        core = Encoder("e", 1, None, Settings())
        core.step(ask(), 0.0)
        if done:
            core.step(EncodeDone("x", b"rows"), 0.1)
        core.step(m.Release("r", 1, False), 0.2)
        assert not core.held and not only(core.step(ask(), 0.3), m.ImageReady)
        core = Encoder("e", 1, None, Settings())
        core.step(ask(), 0.0)
        if done:
            core.step(EncodeDone("x", b"rows"), 0.1)
        actions = core.step(RankDied(0), 0.2)
        assert bool(only(actions, m.WorkFailed)) is not done and not core.embeddings
        assert core.step(m.WantEmbedding("r", 1, "x", "p", 1000), 0.3) == []


def test_encoder_leaves_when_nobody_needs_it_or_its_grace_is_over():
    core = Encoder("e", 1, None, Settings())
    core.step(m.Start(), 0.0)
    core.step(ask(), 0.0)
    core.step(EncodeDone("x", b"rows"), 0.1)
    core.step(m.Drain("e", 1000, 2.0), 0.2)
    assert not core.gone and only(core.step(ask(request="q"), 0.3), m.ImageReady)
    assert only(core.step(ask(name="new", request="n"), 0.3), m.WorkFailed)
    core.step(m.Release("n", 1, False), 0.4)
    beats(core, 0.4, 3.0)
    assert core.gone


# All


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


# States that are fetched beside the messages


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
