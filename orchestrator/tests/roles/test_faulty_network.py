"""Lost, repeated, late and reordered messages, with deaths between them: tokens come once, in order, and right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roles_kit import Service, image, unreliable

from orchestrator.roles.messages import Drain, Piece, Tokens

WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1", "encoder-0", "router"]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    loss=st.sampled_from([0.0, 0.05, 0.2]),
    repeat=st.sampled_from([0.0, 0.3]),
    late=st.sampled_from([0.0, 0.1, 0.4]),
    deaths=st.lists(st.tuples(st.sampled_from(WORKERS), st.floats(0.0, 3.0)), max_size=3),
    cancels=st.lists(st.integers(0, 7), max_size=2),
    drained=st.booleans(),
)
def test_every_request_has_one_outcome_and_right_tokens(seed, loss, repeat, late, deaths, cancels, drained):
    fate = unreliable(seed, loss, repeat, late)
    service = Service(prefill=2, decode=2, encoder=1, fate=fate)
    for number in range(8):
        images = (image(f"i{number % 2}"),) if number % 4 == 0 else ()
        service.request(f"r{number}", seed=seed + number, most=5 + 7 * number, images=images)
    if drained:
        service.run(0.2)
        core = service.core("decode-1")
        service.give("decode-1", Drain("decode-1", core.incarnation, 0.3))
    for who, pause in deaths:
        service.run(pause)
        if service.core(who) is not None:
            service.crash(who)
            service.run(pause / 2)
            service.start(who)
    for number in cancels:
        service.cancel(f"r{number}")
    service.run(20)
    service.fate = lambda source, to, message: [0.001]  # healed: all have to end now
    service.finish(120)
    service.check()
    for number, answer in enumerate(service.answers.values()):
        assert answer.end.outcome == "finished" or number in cancels, answer.end
    service.run(10)
    service.quiet()


@pytest.mark.parametrize("how", ["flip", "cut", "foreign", "swap"])
def test_broken_parts_are_asked_for_again(how):
    broken = 0
    kept = {}

    def fate(source, to, message):
        return [0.001]

    service = Service(fate=fate)
    push = service._push

    def tamper(at, name, life, event):
        nonlocal broken
        if isinstance(event, Piece) and broken < 5 and event.payload:
            broken += 1
            payload = event.payload
            changed = {
                "flip": payload[:-1] + bytes([payload[-1] ^ 1]),
                "cut": payload[:-1],
                "foreign": b"x" * len(payload),
                "swap": kept.get("last", b"?"),
            }[how]
            kept["last"] = payload
            event = Piece(event.request, event.epoch, event.source_incarnation, event.part, changed)
        push(at, name, life, event)

    service._push = tamper
    service.request(most=8)
    service.finish(20)
    service.check()
    assert broken == 5 and service.answers["r"].end.outcome == "finished"
    assert service.core("entry").outcomes["finished"] == 1


def test_a_state_that_never_comes_whole_is_recomputed_and_then_fails():
    service = Service()
    push = service._push

    def tamper(at, name, life, event):
        if isinstance(event, Piece) and event.part == 0:
            event = Piece(event.request, event.epoch, event.source_incarnation, 0, b"never right")
        push(at, name, life, event)

    service._push = tamper
    service.request(most=8)
    service.finish(120)
    assert service.answers["r"].end.outcome == "failed" and service.answers["r"].end.status == 500
    assert service.answers["r"].tokens == []
    service.run(8)
    service.quiet()


def test_a_lost_message_in_a_stream_is_made_up_for_at_once():
    lost = []

    def fate(source, to, message):
        if isinstance(message, Tokens) and message.index == 50 and not lost:
            lost.append(message)
            return []
        return [0.001]

    service = Service(fate=fate)
    service.request(most=1000, seed=1000)
    service.run(0.8)
    assert lost and len(service.answers["r"].tokens) > 100
    service.finish(20)
    service.check()
