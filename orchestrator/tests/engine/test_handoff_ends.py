"""Handoffs that end otherwise: aborted on either side, called off, by tokens alone; memory comes back exactly."""

from __future__ import annotations

import pytest

from orchestrator.engine.handoff.given_out import GivenOut
from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.engine.request import Finished, GrammarSpec, SamplingParams, TokenOutput
from orchestrator.engine.sequence import State

MODES = ["alone", "in order", "worker"]


def params(seed, **options):
    return SamplingParams(**{"seed": seed, "max_tokens": 24, "ignore_eos": True} | options)


def empty(engine):
    """Counters are where they were when the engine was new."""
    scheduler = engine.scheduler
    assert not engine.has_work and not engine._sequences and not engine._leavers
    for pool in (scheduler.blocks, scheduler.slots):
        assert (pool.used, pool.fenced, pool.free) == (0, 0, pool.capacity)
    assert not (scheduler.running or scheduler.waiting or scheduler.parked or scheduler.leaving)


def tokens_of(events):
    return [event.token_id for event in events if isinstance(event, TokenOutput)]


POINTS = ["before the offer", "offered", "rows on their way", "closed", "all put", "committed"]


@pytest.mark.parametrize("mode", ["alone", "worker"])
@pytest.mark.parametrize("where", ["sender", "receiver"])
@pytest.mark.parametrize("point", POINTS)
def test_aborted_at_any_point(kit, nano, others, mode, where, point):
    """One end in all, nothing is held anywhere, and others on both engines go on."""
    engines = [kit.engine_of(nano, mode=mode, chunk_tokens=130) for _ in range(2)]
    (first, second), doors = engines, [Handoffs(engine) for engine in engines]
    for engine, (other, _) in zip(engines, others, strict=True):
        engine.add("other", *other)
    first.add("r", kit.prompt_of(200, 1), params(1, max_tokens=6), leaves_at=2)
    events = [[], []]

    def step():
        for engine, mine in zip(engines, events, strict=True):
            mine += engine.step()

    def hand_on():
        """The owner of both sides; says what is reached, and looks whether the request is still wanted."""
        yield "before the offer"
        leaving = doors[0].begin("r")
        coming = doors[1].reserve(*leaving.take()[0])
        try:
            yield "offered"
            while leaving.alive and not leaving.due:
                step()
                leaving.collect()
                for part in leaving.take():
                    coming.put(*part)
                yield "rows on their way"
            leaving.close()
            yield "closed"
            for part in leaving.take():
                coming.put(*part)
            yield "all put"
            if leaving.alive:
                coming.commit()
                yield "committed"
                if not leaving.done():  # it is over, whoever has it
                    second.abort("r")
        finally:
            leaving.cancel()
            coming.cancel()

    step()
    try:
        for reached in hand_on():
            if reached == point:
                (first if where == "sender" else second).abort("r")
    except (HandoffRefused, ValueError) as error:
        assert "ended" in str(error)
    for _ in range(100):
        if any(engine.has_work for engine in engines):
            step()
    for engine, mine in zip(engines, events, strict=True):
        mine += engine.take_events()
        empty(engine)
    ends = [e.reason for mine in events for e in mine if isinstance(e, Finished) and e.request_id == "r"]
    unheard = where == "receiver" and point != "committed"  # an abort where the request is not finds nothing
    assert ends == (["length"] if unheard else ["abort"] * (2 if (where, point) == ("sender", "committed") else 1))
    for mine, (_, expected) in zip(events, others, strict=True):
        assert tokens_of(e for e in mine if e.request_id == "other") == expected


@pytest.fixture(scope="module")
def others(kit, nano):
    """What else runs: (request, its tokens)."""
    requests = [(kit.prompt_of(50 + i, 30 + i), params(30 + i, max_tokens=12)) for i in range(2)]
    return [(request, kit.run(kit.engine_of(nano), {"o": request})["o"][0]) for request in requests]


@pytest.mark.parametrize(("mode", "form"), [("alone", "replay"), ("worker", "full"), ("in order", "tokens")])
def test_called_off_again_and_again(kit, nano, mode, form):
    """The request goes on where it was, as if nothing had been; also one that waits."""
    requests = {str(i): (kit.prompt_of(70 * i + 1, i), params(i)) for i in range(4)}
    expected = kit.run(kit.engine_of(nano, speculation="off"), requests)
    engine = kit.engine_of(nano, mode=mode, max_num_seqs=3, chunk_tokens=100)
    door = Handoffs(engine)
    for name, request in requests.items():
        engine.add(name, *request)
    tokens, kept = {name: [] for name in requests}, 0
    for _ in range(300):
        if not engine.has_work:
            break
        events = engine.step()
        for name in requests:
            sequence = engine.find(name)
            if sequence is None or (sequence.state is State.WAITING and form != "tokens"):
                continue
            try:
                door.give(name, form)
            except HandoffRefused:
                continue
            events += engine.take_events()
            assert engine.find(name).state is State.LEAVING
            kept += door.conclude(name, taken=False)
        for event in events:
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
    assert tokens == {name: outcome[0] for name, outcome in expected.items()}
    assert kept > 15 and door.counts["kept"] == kept
    empty(engine)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_stopped_while_a_step_is_in_flight(kit, nano, mode, taken):
    """It was in the next step already: what that brings is dropped, here and there, and so are the drafts behind it."""
    requests = {str(i): (kit.prompt_of(30 + i, i), params(i, max_tokens=40)) for i in range(3)}
    expected = kit.run(kit.engine_of(nano, speculation="off"), requests)
    known = {p.seed: prompt + expected[name][0] for name, (prompt, p) in requests.items()}
    one, other = (kit.engine_of(nano, mode=mode, speculation=5) for _ in range(2))
    for engine in (one, other):
        kit.tutor(engine, known, lambda seed, position: (seed + position) % 6)
    door, events, in_flight = Handoffs(one), [], 0
    leaves = {"0": 7, "1": 12, "2": 25}
    leaving = {}
    for name, request in requests.items():
        one.add(name, *request, leaves_at=leaves[name])
        leaving[name] = door.begin(name)
    for _ in range(60):
        events += one.step()
        for going in [going for going in leaving.values() if going.due]:
            flight = None if one.pipeline is None else one.pipeline.flight
            in_flight += flight is not None and any(s.request_id == going.request_id for s in flight.sequences)
            going.close()
            if taken:
                Handoffs(other).take(going.take())
            assert going.done() if taken else going.cancel()
            assert taken or not one.find(going.request_id).drafts
        events += other.step() if other.has_work else []
        if not (one.has_work or other.has_work):
            break
    assert {name: tokens_of(e for e in events if e.request_id == name) for name in requests} == {
        name: outcome[0] for name, outcome in expected.items()
    }
    assert (in_flight > 0) == (mode != "alone")
    empty(one)
    empty(other)


def test_leaving_requests_hold_what_they_held(kit, nano):
    """They compute nothing, and others cannot take their memory; the engine is idle beside them."""
    engine = kit.engine_of(nano, num_blocks=4)
    engine.add("r", kit.prompt_of(200, 1), params(1), leaves_at=1)
    engine.add("long", kit.prompt_of(300, 2), params(2))
    events = []
    while engine.scheduler.running or not engine.scheduler.leaving:
        events += engine.step()
    assert engine.scheduler.blocks.used == 2 and len(tokens_of(events)) == 1
    held = engine.cache.save_blocks(engine.find("r").blocks)
    for _ in range(5):
        assert not engine.step()  # three blocks are wanted, two are free
    assert all(
        a.equal(b)
        for layer, pair in engine.cache.save_blocks(engine.find("r").blocks).items()
        for a, b in zip(pair, held[layer], strict=True)
    )
    Handoffs(engine).give("r", "tokens")
    engine.abort("r")
    assert [e.reason for e in engine.take_events() if isinstance(e, Finished)] == ["abort"]
    expected = kit.run(kit.engine_of(nano), {"long": (kit.prompt_of(300, 2), params(2))})["long"][0]
    assert kit.finish(engine)["long"][0] == expected


@pytest.mark.parametrize("mode", ["alone", "worker"])
def test_tokens_alone(kit, nano, tokenizer, mode):
    """As after a crash: what was given out is read again, and the rest follows; grammar, stops and seed with it."""
    prompt = tokenizer.encode("Say: ")
    requests = {
        "plain": (kit.prompt_of(150, 1), params(1)),
        "grammar": (prompt, params(2, grammar=GrammarSpec("regex", "(ab|c[de]){3,9}z"))),
        "least": (prompt, params(3, min_tokens=12, ignore_eos=False, stop_token_ids=tuple(range(40, 90)))),
        "every row": (prompt, params(4, prompt_logprobs=True)),
    }
    expected = kit.run(kit.engine_of(nano, tokenizer, speculation="off"), requests)
    for steps in (0, 1, 3):
        one, other = (kit.engine_of(nano, tokenizer, mode=mode) for _ in range(2))
        door = Handoffs(one)
        for name, request in requests.items():
            one.add(name, *request)
        events = [event for _ in range(steps) for event in one.step()]
        for name in requests:
            if one.find(name) is not None:
                parts = door.give(name, "tokens")
                assert [n for n, _ in parts] == ["offer", "tokens", "state", "manifest"]
                Handoffs(other).take(parts)
                door.conclude(name, taken=True)
        events += one.take_events()
        empty(one)
        while other.has_work:
            events += other.step()
        for name, outcome in expected.items():
            assert tokens_of(e for e in events if e.request_id == name) == outcome[0]
            (end,) = [e for e in events if isinstance(e, Finished) and e.request_id == name]
            assert (end.reason, end.stop_token) == (outcome[3].reason, outcome[3].stop_token)
            assert end.completion_tokens == outcome[3].completion_tokens
        empty(other)


def test_a_secret_seed_comes_with_the_tokens(kit, nano):
    setting, outcomes = SamplingParams(max_tokens=30, ignore_eos=True), []
    for form in (None, "tokens"):
        engine, other = (kit.engine_of(nano, speculation="off") for _ in range(2))
        engine.add("r", [5, 9], setting, seed=12345)
        events = [event for _ in range(6) for event in engine.step()]
        if form is not None:
            Handoffs(other).take(Handoffs(engine).give("r", form))
            engine = other
        while engine.has_work:
            events += engine.step()
        outcomes.append(tokens_of(events))
    assert outcomes[0] == outcomes[1] and len(outcomes[0]) == 30


@pytest.mark.parametrize("cut", [1, 11, 23, 24])
def test_after_a_crash_by_what_was_given_out(kit, nano, tokenizer, cut):
    """`Engine.add` with the tokens that clients have: also where the last of them had ended the request already."""
    prompt, free = tokenizer.encode("Go: "), params(6)
    text = kit.run(kit.engine_of(nano, tokenizer), {"r": (prompt, free)})["r"][2]
    stop = text[-4:-1]
    for setting in (free, params(6, stop=(stop,)), params(6, grammar=GrammarSpec("regex", "[a-z]{8}"))):
        expected = kit.run(kit.engine_of(nano, tokenizer), {"r": (prompt, setting)})["r"]
        known = GivenOut("r", tuple(prompt), setting)
        for index, token in enumerate(expected[0][:cut]):
            assert known.note(index, token) and not known.note(index, token) and not known.note(index + 2, token)
        engine = kit.engine_of(nano, tokenizer)
        engine.add(known.id, list(known.prompt), known.params, generated=tuple(known.tokens))
        events = engine.take_events()
        if cut >= len(expected[0]):
            assert not engine.has_work  # ended at once
        while engine.has_work:
            events += engine.step()
        assert known.tokens + tokens_of(events) == expected[0]
        (end,) = [e for e in events if isinstance(e, Finished)]
        assert (end.reason, end.stop_sequence) == (expected[3].reason, expected[3].stop_sequence)
        assert end.completion_tokens == expected[3].completion_tokens
        empty(engine)


def test_given_out_tokens_that_cannot_be(kit, nano, tokenizer):
    engine = kit.engine_of(nano, tokenizer)
    wrong = tokenizer.encode("0")
    for generated, setting, message in (
        ((1,) * 25, params(1), "generated: got more than 24 tokens"),
        (tuple(wrong), params(1, grammar=GrammarSpec("regex", "[a-z]{8}")), "the grammar does not allow"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add("r", [1, 2], setting, generated=generated)
        empty(engine)
