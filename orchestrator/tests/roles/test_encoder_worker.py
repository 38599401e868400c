"""Encoders: what each message does in each state, and what a wrong one does not."""

from roles_kit import only
from worker_kit import ask, beats

from orchestrator.roles import Encoder, EncoderOptions, Settings
from orchestrator.roles import messages as m
from orchestrator.roles.engine_port import (
    Encode,
    EncodeDone,
    RankDied,
)
from orchestrator.roles.state_parts import checksum_of


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
