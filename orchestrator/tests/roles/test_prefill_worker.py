"""Prefill workers: what each message does in each state, and what a wrong one does not."""

import pytest
from roles_kit import only
from worker_kit import JOB_STATES, PARTS, SPEC, assign, beats, manifest, prefill_in

from orchestrator.balance.prefill.quota import Quota
from orchestrator.roles import Prefill, PrefillOptions, Settings
from orchestrator.roles import messages as m
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    Drop,
    Export,
    Exported,
    PrefillDone,
    RankDied,
    Reform,
    Reformed,
    RunPrefill,
)
from orchestrator.roles.state_parts import checksum_of


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


@pytest.mark.parametrize(("ahead", "start"), [(0, 64), (64, 64), (3990, 3990), (4000, 3999), (10**9, 3999)])
def test_prefill_asks_for_nothing_that_the_engine_found_in_its_cache(ahead, start):
    """But for one token at least: something has to be the last step."""
    core = Prefill("p", 1, PrefillOptions(quota=Quota(tokens=64)), Settings())
    core.step(m.Start(), 0.0)
    core.step(m.AssignPrefill("r", 1, 1000, "entry", m.RequestSpec(tuple(range(4000)), 50), (), "d", 1000), 0.0)
    (run,) = only(core.step(Began("r", 1, 0), 0.0), RunPrefill)
    assert [(c.start, c.count, c.final) for c in run.chunks] == [(0, 64, False)]
    others = (("r", 2, 1000), ("q", 1, 1000))
    (run,) = only(core.step(PrefillDone(1, 0.1, ahead=(*others, ("r", 1, ahead))), 0.1), RunPrefill)
    (chunk,) = run.chunks
    assert (chunk.start, chunk.final) == (start, start + 64 >= 4000)
    assert chunk.start + chunk.count <= 4000


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
