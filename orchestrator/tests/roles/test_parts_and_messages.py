"""Manifests, checksums, and messages on their way through bytes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.roles import Settings
from orchestrator.roles import messages as m
from orchestrator.roles.state_parts import KINDS, Manifest, Part, checksum_of, fault_of, is_whole, part_of


def manifest(**changes):
    parts = tuple(part_of(kind, kind.encode()) for kind in KINDS)
    return msgspec.structs.replace(Manifest("layout", 10, (3,), False, parts), **changes)


def fault(found, *, prompt=10, output=(), grammar=True):
    return fault_of(found, "layout", prompt, output, grammar=grammar)


def test_a_whole_state_has_no_fault():
    assert fault(manifest()) == ""
    assert fault(manifest(tokens=11)) == ""  # the last token has its rows too
    assert fault(manifest(output=(), tokens=10, replay_tail=True)) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_to_be_named(kind):
    parts = tuple(p for p in manifest().parts if p.kind != kind)
    assert kind in fault(manifest(parts=parts))


@pytest.mark.parametrize("kind", ["global", "window", "sampler", "grammar"])
def test_kinds_that_every_request_has_are_not_empty(kind):
    parts = tuple(Part(p.kind, 0 if p.kind == kind else p.length, p.checksum) for p in manifest().parts)
    assert fault(manifest(parts=parts)) == f"{kind} is empty"


def test_what_a_replay_makes_anew_may_be_left_out():
    parts = tuple(part_of(p.kind, b"") if p.kind in ("window", "tail", "drafter") else p for p in manifest().parts)
    assert fault(manifest(parts=parts, replay_tail=True, output=(), tokens=10)) == ""
    assert fault(manifest(parts=parts)) == "window is empty"


def test_what_a_request_may_lack():
    empty = {"tail", "lookback", "drafter", "grammar"}
    parts = tuple(part_of(p.kind, b"") if p.kind in empty else p for p in manifest().parts)
    assert fault(manifest(parts=parts), grammar=False) == ""


@pytest.mark.parametrize("tokens", [0, 9, 12, 10**9])
def test_short_and_long_states_are_refused(tokens):
    assert "positions" in fault(manifest(tokens=tokens))


def test_foreign_states_are_refused():
    assert "layout" in fault(manifest(layout="other"))
    assert "output" in fault(manifest(), output=(4,))
    assert "output" in fault(manifest(), output=(3, 4))
    assert fault(manifest(), output=(3,)) == ""


def test_an_ended_state_needs_no_parts():
    assert fault(manifest(parts=(), reason="stop", output=())) == ""
    assert fault(manifest(parts=(), reason="stop", output=(1,)), output=(2,)) != ""


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_parts_are_known_by_length_and_checksum(payload, other):
    part = part_of("global", payload)
    assert is_whole(part, payload) and (part.length, part.checksum) == (len(payload), checksum_of(payload))
    assert is_whole(part, other) == (payload == other)
    assert not is_whole(part, payload + b"\0")


SPEC = m.RequestSpec((1, 2, 3), 5, 7, "t", 2, (m.Image("d", 4),), "g", 9, b"p")
MESSAGES = [
    m.Submit("r", 1, "e", SPEC, (4,), 2), m.Wanted("r", 1, "e"), m.Unknown("r", 1), m.Accepted("r", 1, 2),
    m.Refused("r", 1, 429, 3, "w"), m.Lost("r", 1, "w"), m.Release("r", 1, True, 3, "e"), m.Released("r", 1),
    m.WorkFailed("r", 1, "w", 2, "y"), m.ReportAck("w", 1, 2, 3), m.AssignImage("r", 1, 2, "e", m.Image("d", 4)),
    m.Report("w", "decode", 1, 2, "active", (m.Holding("r", 1, "e", 3, True),), 1.0, 2.0),
    m.ImageReady("r", 1, "d", "w", 2), m.Reserve("r", 1, 2, "e", SPEC, (), "s", 3, 4),
    m.AssignPrefill("r", 1, 2, "e", SPEC, (), "t", 3, "decode", (m.Embedding("d", "w", 1),)),
    m.WantEmbedding("r", 1, "d", "w", 2), m.EmbeddingPiece("r", 1, "d", 2, b"x"), m.SourceAlive("r", 1, "s", 2),
    m.SourceAlive("r", 1, "s", 2, b"t"),
    m.TargetAlive("r", 1, "t", 2, True), m.SourceGone("r", 1, "s", 2), m.Offer("r", 1, "s", 2, 3, manifest()),
    m.Want("r", 1, "t", 2, 3, (0, 4)), m.Piece("r", 1, 2, 3, b"x"), m.Taken("r", 1, "t", 2, False, "w"),
    m.Tokens("r", 1, "w", 2, 3, 4, 5, (6,), "stop", 7), m.TokensAck("r", 1, 2), m.Drain("w", 1, 60.0),
    m.Gone("w", "decode", 1), m.MoveWanted("r", 1, "w", 2, "e", SPEC, (4,), 1), m.MoveTo("r", 1, 1, "t", 2),
    m.Landed("r", 1, "w", 2, (4,)), m.Resume("r", 1, 2, 3, 4),
    m.LoadReport(1, 2, (m.RoleLoad("decode", ("a",), (1,), (), 0.5, 1, 2, 3, 4),)),
]  # fmt: skip


def test_messages_survive_the_wire():
    assert {type(x) for x in MESSAGES} == set(m.Message.__args__)
    decoder = msgspec.msgpack.Decoder(m.Message)
    for message in MESSAGES:
        assert decoder.decode(msgspec.msgpack.encode(message)) == message
        with pytest.raises(AttributeError):
            message.request = "other"


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("prompt", {"prompt": ()}),
        ("max_tokens", {"max_tokens": 0}),
        ("hit", {"hit": 3}),
        ("hit", {"hit": -1}),
        ("expected_output", {"expected_output": -1}),
    ],
)
def test_bad_requests_are_named(argument, changes):
    with pytest.raises(ValueError, match=f"^{argument}: got .* allowed is"):
        m.RequestSpec(**{"prompt": (1, 2, 3), "max_tokens": 1, **changes})


@pytest.mark.parametrize(("name", "value"), [("beat", 0), ("lease", 1.0), ("silence", 0.5), ("tombstone", 6.0)])
def test_times_have_to_fit_together(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        Settings(**{name: value})


def test_a_party_refuses_what_is_for_another():
    from orchestrator.roles import Entry

    with pytest.raises(TypeError, match="entry: Drain is for another party"):
        Entry("entry").step(m.Drain("w", 1, 60.0), 0.0)
