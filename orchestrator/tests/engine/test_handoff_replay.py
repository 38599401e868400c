"""Handoffs without windows: prefill stops behind the last layer that makes global rows, and the receiver replays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.engine.handoff.replay import plan_replay
from orchestrator.engine.request import Ready, SamplingParams, TokenOutput
from orchestrator.evaluate.feed import Bounds, Feeder, Piece
from swa_replay import plan_decoder_tail


def greedy(tokens=8, **options):
    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0} | options)


def until_due(door, request_id, form):
    leaving = door.begin(request_id, form)
    events = []
    for _ in range(200):
        if leaving.due:
            break
        events += door.engine.step()
    leaving.close()
    return leaving, events


def handed_on(kit, model, prompt, params, **options):
    """(tokens, log-probabilities, `Ready` events) of a prompt whose global rows alone came from another engine."""
    first, second = (kit.engine_of(model, **options) for _ in range(2))
    first.add("r", prompt, params, leaves_at=0)
    door = Handoffs(first)
    leaving, events = until_due(door, "r", "replay")
    parts = leaving.take()
    assert not any(name.startswith(("window", "tail")) for name, _ in parts)
    assert Handoffs(second).take(parts) == "r" and leaving.done()
    assert first.scheduler.blocks.used == first.scheduler.slots.used == 0 and not first.has_work
    tokens, logprobs = [], []
    while second.has_work:
        events += second.step()
    for event in events:
        if isinstance(event, TokenOutput):
            tokens.append(event.token_id)
            logprobs.append(event.logprob)
    assert second.scheduler.blocks.used == second.scheduler.slots.used == 0
    return tokens, logprobs, sum(isinstance(e, Ready) for e in events)


@pytest.mark.parametrize(("mode", "speculation"), [("alone", "off"), ("worker", 5)])
@pytest.mark.parametrize("length", [1, 2, 31, 43, 44])
def test_a_prompt_as_long_as_the_decoder_keeps_is_exact(kit, nano, length, mode, speculation):
    assert nano.config.keep_tokens == 44
    prompt = kit.prompt_of(length, 1)
    expected = kit.run(kit.engine_of(nano, speculation="off"), {"r": (prompt, greedy(30))})["r"]
    tokens, logprobs, readies = handed_on(kit, nano, prompt, greedy(30), mode=mode, speculation=speculation)
    assert (tokens, logprobs, readies) == (expected[0], expected[1], 1)


@pytest.mark.parametrize("chunk", [512, 50])
@pytest.mark.parametrize("length", [45, 127, 128, 129, 255, 300])
def test_a_longer_one_follows_the_replay_oracle(kit, nano, length, chunk):
    prompt, config = kit.prompt_of(length, 2), nano.config
    tokens, logprobs, _ = handed_on(kit, nano, prompt, greedy(), chunk_tokens=chunk, speculation=5)
    plan = plan_replay(length, length, config.sliding_window, config.draft_length)
    assert plan.replayed == config.keep_tokens and plan.start == plan_decoder_tail(length, 32, 5).start
    feeder, bounds = Feeder(nano, 1, length + 9), Bounds(plan.lower, plan.lower, plan.write_floor)
    feeder.run(Piece(0, prompt, 0, length, "none"))
    feeder.forget_windows(0)
    row, told = feeder.run(Piece(0, prompt, plan.start, length, "last", bounds)), list(prompt)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert int(row.argmax()) == token
        assert row.double().log_softmax(-1)[0, token].item() == pytest.approx(logprob, abs=1e-6)
        told.append(token)
        row = feeder.run(Piece(0, told, len(told) - 1, len(told), "last", bounds))


def test_prefill_without_decoder_computes_none_of_it(kit, nano, monkeypatch):
    """The layers behind the producer see no row, in a batch of their own and beside others, whose tokens stay."""
    engine = kit.engine_of(nano, speculation="off")
    rows = {}
    for layer, attention in enumerate(nano.attention):
        monkeypatch.setattr(
            attention, "output", lambda heads, layer=layer, output=attention.output: (
                rows.__setitem__(layer, rows.get(layer, 0) + heads.shape[0]), output(heads))[1],
        )  # fmt: skip
    engine.add("r", kit.prompt_of(60, 1), greedy(), leaves_at=0)
    while engine.has_work:
        engine.step()
    half = nano.config.encoder_layers
    assert [rows.get(layer, 0) for layer in range(nano.config.num_hidden_layers)] == [60] * half + [0] * half
    other = {"other": (kit.prompt_of(90, 4), greedy())}
    expected = kit.run(kit.engine_of(nano, speculation="off"), other)
    engine.add("again", kit.prompt_of(70, 5), greedy(), leaves_at=0)
    engine.add("other", *other["other"])
    found = []
    while engine.has_work:
        found += [e.token_id for e in engine.step() if isinstance(e, TokenOutput)]
    assert found == expected["other"][0]
    assert [s.request_id for s in engine.scheduler.leaving] == ["r", "again"]
    for name in ("r", "again"):
        engine.abort(name)
    assert engine.scheduler.blocks.used == engine.scheduler.slots.used == 0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_called_off_the_sender_replays_itself(kit, nano, steps):
    """Cancelled within the prompt or behind it: tokens are those of a receiver's replay, or of a cold prompt."""
    prompt = kit.prompt_of(200, 3)
    expected = handed_on(kit, nano, prompt, greedy())[:2]
    cold = kit.run(kit.engine_of(nano), {"r": (prompt, greedy())})["r"][:2]
    engine = kit.engine_of(nano, chunk_tokens=60)
    engine.add("r", prompt, greedy(), leaves_at=0)
    leaving = Handoffs(engine).begin("r", "replay")
    for _ in range(steps):
        engine.step()
    assert leaving.cancel() and not leaving.cancel()
    assert kit.finish(engine)["r"][:2] == (cold if steps < 3 else expected)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_closed_before_the_prompt_is_read(kit, nano, steps):
    """Only some of the rows come; the receiver reads the rest of the prompt."""
    prompt = kit.prompt_of(44, 9)
    expected = kit.run(kit.engine_of(nano), {"r": (prompt, greedy())})["r"]
    first, second = kit.engine_of(nano, chunk_tokens=13), kit.engine_of(nano, chunk_tokens=20)
    first.add("r", prompt, greedy(), leaves_at=0)
    for _ in range(steps):
        first.step()
    door = Handoffs(first)
    parts = door.give("r", "replay")
    coming = Handoffs(second).reserve(*parts[0])
    for part in parts[1:]:
        coming.put(*part)
    coming.commit()
    sequence = second.find("r")
    assert (sequence.computed, sequence.global_floor, sequence.held) == (0, 13 * steps, 13 * steps)
    assert door.conclude("r", taken=True)
    assert kit.finish(second)["r"][:3] == expected[:3]


def test_in_the_midst_of_decoding(kit, nano):
    """Global rows of the tokens so far; the newest token has none yet."""
    prompt = kit.prompt_of(20, 6)
    expected = kit.run(kit.engine_of(nano, speculation="off"), {"r": (prompt, greedy(24))})["r"]
    first, second = kit.engine_of(nano, speculation=5), kit.engine_of(nano, mode="worker")
    first.add("r", prompt, greedy(24))
    tokens = []
    for _ in range(3):
        tokens += [e.token_id for e in first.step() if isinstance(e, TokenOutput)]
    assert len(tokens) + len(prompt) <= 44
    door = Handoffs(first)
    Handoffs(second).take(door.give("r", "replay"))
    assert door.conclude("r", taken=True)
    tokens += kit.finish(second)["r"][0]
    assert tokens == expected[0]


@pytest.mark.parametrize("mode", ["bounded", "canonical", "exact"])
def test_only_bounded_mode_shares_what_comes_behind_a_replay(kit, nano, mode):
    first, second = (kit.engine_of(nano, prefix_cache=mode) for _ in range(2))
    prompt = kit.prompt_of(300, 7)
    first.add("r", prompt, greedy(100), leaves_at=0)
    leaving, _ = until_due(Handoffs(first), "r", "replay")
    Handoffs(second).take(leaving.take())
    leaving.done()
    told = kit.finish(second)["r"][0]
    known = second.scheduler.blocks.match(second.prefix.chain_of(prompt + told).keys)
    assert len(known) == (3 if mode == "bounded" else 0)
    assert len(first.scheduler.blocks.match(first.prefix.chain_of(prompt).keys)) == 2


def test_forms_that_a_request_cannot_take(kit, nano):
    engine = kit.engine_of(nano)
    door = Handoffs(engine)
    engine.add("every row", kit.prompt_of(50, 8), greedy(prompt_logprobs=True))
    engine.add("no decoder", kit.prompt_of(50, 8), greedy(), leaves_at=0)
    engine.step()
    for name, form in (("every row", "replay"), ("no decoder", "full"), ("no decoder", "other"), ("nobody", "full")):
        with pytest.raises(ValueError, match=r"^(form|request_id): got"):
            door.begin(name, form)
    for options in ({"leaves_at": -1}, {"leaves_at": True}, {"leaves_at": 0, "generated": (3,)}):
        with pytest.raises(ValueError, match=r"^leaves_at: got"):
            engine.add("new", [1, 2], greedy(), **options)
    with pytest.raises(ValueError, match=r"^leaves_at: got 0, allowed is None or an integer of at least 1"):
        engine.add("new", [1, 2], greedy(prompt_logprobs=True), leaves_at=0)
    leaving = door.begin("no decoder", "replay")
    engine.abort("no decoder")
    with pytest.raises(HandoffRefused, match="has ended") as error:
        leaving.close()
    assert error.value.reason == "ended"


@given(st.integers(1, 5000), st.data(), st.integers(1, 256), st.integers(0, 8))
def test_plans(length, data, window, drafts):
    """What is fed covers all that has no rows, the whole decoder tail, and a window before what is missing."""
    written = data.draw(st.integers(0, length))
    plan = plan_replay(written, length, window, drafts)
    assert 0 <= plan.start < length and plan.start <= written
    assert plan.start <= max(0, length - window - 2 * (drafts + 1)) and plan.start <= max(0, written - window)
    assert plan.start == 0 or plan.start in (written - window, length - window - 2 * (drafts + 1))
    assert plan.write_floor == written
    for wrong in (-1, length + 1):
        with pytest.raises(ValueError, match=r"^written: got"):
            plan_replay(wrong, length, window, drafts)
