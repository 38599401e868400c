"""What a reader gets: the events of an engine, whatever the network does to the messages."""

import asyncio
import random

import pytest
from service_kit_front import PATIENT, Rig, note_of, unreliable, wait_until

from orchestrator.engine.request import Finished, GrammarSpec, Ready, SamplingParams, TokenOutput
from orchestrator.roles.handoff_port import decode_note
from orchestrator.service.config import StoreSettings

PROMPT = list(range(3, 40))


async def collect(engine, name="r", prompt=PROMPT, **params):
    return [e async for e in engine.generate(name, prompt, SamplingParams(**{"max_tokens": 50, **params}))]


def text_of(events):
    return "".join(getattr(e, "text", "") for e in events)


def test_order_of_events(make_rig, tokenizer):
    rig = make_rig("Hello, wörld 🎉")
    expected = tokenizer.encode_with_specials("Hello, wörld 🎉")
    events = asyncio.run(collect(rig.engine))
    assert events[0] == Ready("r", len(PROMPT), 1)
    assert [e.token_id for e in events[1:-1]] == expected
    assert text_of(events) == "Hello, wörld 🎉"
    end = events[-1]
    assert isinstance(end, Finished) and end.reason == "stop" and end.cached_tokens == 1
    assert end.prompt_tokens == len(PROMPT) and end.completion_tokens == len(expected) + 1, "an end token counts"
    assert end.stop_token == tokenizer.eos_ids[0] or len(set(tokenizer.eos_ids)) > 1


def test_length(make_rig):
    events = asyncio.run(collect(make_rig().engine, max_tokens=2))
    assert len(events) == 4 and events[-1].reason == "length" and events[-1].completion_tokens == 2


@pytest.mark.parametrize("kind", ["embedded", "none"])
def test_roles_are_told_what_a_common_store_has(make_rig, kind):
    """The second of two equal prompts is planned with what is left to compute of it."""
    seen = []

    def script(spec):
        seen.append(spec.hit)
        return [40, 41]

    rig, prompt = make_rig(script, store=StoreSettings(kind, "somewhere")), list(range(3, 303))
    for name in ("a", "b"):
        asyncio.run(collect(rig.engine, name, prompt, max_tokens=2))
    assert seen[0] == 0 and seen[-1] == (256 if kind == "embedded" else 0)


def test_stop_string(make_rig, tokenizer):
    tokens = tokenizer.encode_with_specials("one two three four")
    for most in range(1, len(tokens) + 1):  # a worker stops with the token that completes it
        text = "".join(tokenizer.token_bytes(t).decode() for t in tokens[:most])
        if "thr" in text:
            break
    rig = make_rig(lambda spec: tokens[:most])
    events = asyncio.run(collect(rig.engine, stop=("thr",)))
    end = events[-1]
    assert text_of(events) == "one two " and (end.reason, end.stop_sequence) == ("stop", "thr")
    assert end.completion_tokens == most and end.stop_token is None


def test_grammar_that_ends_the_text(make_rig, tokenizer):
    rig = make_rig("abc")
    events = asyncio.run(collect(rig.engine, grammar=GrammarSpec("regex", "[a-c]{3}")))
    tokens = len(tokenizer.encode_with_specials("abc"))
    assert events[-1].reason == "stop" and events[-1].completion_tokens == tokens and events[-1].stop_token is None


def test_log_probabilities(make_rig):
    rig = make_rig()
    rig.cluster.notes = True
    events = asyncio.run(collect(rig.engine, logprobs=2))
    tokens = [e for e in events if isinstance(e, TokenOutput)]
    assert [e.logprob for e in tokens] == [-0.25 * (i + 1) for i in range(len(tokens))]
    assert all(e.top_logprobs == ((e.token_id, -0.5), (e.token_id + 1, -1.5)) for e in tokens)
    plain = [e for e in asyncio.run(collect(rig.engine)) if isinstance(e, TokenOutput)]
    assert all(e.logprob is None and e.top_logprobs == () for e in plain)


def test_what_the_roles_are_told(make_rig, tokenizer):
    specs = []
    rig = make_rig(lambda spec: specs.append(spec) or [5])

    async def several():
        for fields in ({"seed": 7, "cache_salt": "me"}, {}, {}):
            await collect(rig.engine, max_tokens=400, **fields)
        await collect(rig.engine, prompt=[3] * 500, max_tokens=400)

    asyncio.run(several())
    by_request = list(dict.fromkeys(specs))
    assert [s.seed for s in by_request][:1] == [7] and by_request[0].tenant == "me"
    assert len({s.seed for s in by_request}) == 4, "a seed is drawn for each request without one"
    assert [s.max_tokens for s in by_request] == [400, 400, 400, 12], "the context holds 512"
    assert by_request[0].expected_output == 256 and by_request[3].expected_output == 12


def test_ids_of_the_roles_never_return(make_rig):
    names = set()

    def listen(source, to, message):
        names.add(getattr(message, "request", ""))
        return [0.0]

    for _ in range(2):
        rig = make_rig("a")
        rig.cluster.fate = listen
        asyncio.run(collect(rig.engine, "same"))
        asyncio.run(collect(rig.engine, "same"))
    assert len(names - {""}) == 4


@pytest.mark.parametrize("seed", range(3))
def test_unreliable_network(make_rig, seed):
    """Loss, repetition and overtaking change nothing of what readers get."""
    rng = random.Random(seed)
    outputs = {n: [rng.randrange(3, 400) for _ in range(rng.randrange(1, 30))] for n in range(1, 9)}
    rig = make_rig(lambda spec: outputs[len(spec.prompt)], prefill=2, decode=2)
    rig.cluster.notes, rig.cluster.fate = True, unreliable(seed)

    async def all_of_them():
        prompts = {n: [5] * n for n in outputs}
        return await asyncio.gather(*(collect(rig.engine, str(n), prompt, logprobs=1) for n, prompt in prompts.items()))

    for number, events in enumerate(asyncio.run(all_of_them()), 1):
        assert isinstance(events[0], Ready) and isinstance(events[-1], Finished)
        tokens = events[1:-1]
        assert [e.token_id for e in tokens] == outputs[number]
        assert [e.logprob for e in tokens] == [-0.25 * (i + 1) for i in range(len(tokens))]
    assert rig.engine.entry.outcomes["finished"] == 8


def test_repeated_messages_are_counted(make_rig):
    rig = make_rig(lambda spec: list(range(3, 40)))
    rig.cluster.fate = lambda source, to, message: [0.0, 0.01]
    events = asyncio.run(collect(rig.engine))
    assert [e.token_id for e in events[1:-1]] == list(range(3, 40))
    wait_until(lambda: sum(rig.engine.status()["dropped"].values()) > 0)
    status = rig.engine.status()
    assert status["received"] == 1 and status["outcomes"]["finished"] == 1 and status["live"] == 0


def test_many_streams(make_rig):
    outputs = {n: [3 + (n * k) % 300 for k in range(1, 9)] for n in range(500)}
    rig = make_rig(lambda spec: outputs[spec.seed], most_waiting=600, settings=PATIENT)

    async def all_of_them():
        return await asyncio.gather(*(collect(rig.engine, str(n), [4, 5], seed=n) for n in outputs))

    for n, events in enumerate(asyncio.run(all_of_them())):
        assert [e.token_id for e in events[1:-1]] == outputs[n] and events[-1].reason == "stop"
    assert rig.engine.status()["outcomes"]["finished"] == 500


def test_a_slow_reader_keeps_nobody_waiting(make_rig):
    rig = make_rig(lambda spec: list(range(3, 43)))

    async def both():
        slow = rig.engine.generate("slow", PROMPT, SamplingParams(max_tokens=50))
        first = await anext(slow)
        for n in range(3):
            await asyncio.wait_for(collect(rig.engine, f"quick {n}"), 60)
        while rig.engine.progress.has_work:  # all of it is made, though nobody reads
            await asyncio.sleep(0.01)
        return [first, *[e async for e in slow]]

    events = asyncio.run(both())
    assert [e.token_id for e in events[1:-1]] == list(range(3, 43)) and isinstance(events[-1], Finished)


def test_without_tokenizer():
    rig = Rig(None, lambda spec: [7, 8])
    try:
        events = asyncio.run(collect(rig.engine))
        assert [e.token_id for e in events[1:-1]] == [7, 8] and text_of(events) == ""
        with pytest.raises(ValueError, match="no tokenizer"):
            asyncio.run(collect(rig.engine, stop=("a",)))
    finally:
        rig.close()


def test_notes_are_those_of_the_port():
    assert decode_note(note_of(0, 5)) == (-0.25, ((5, -0.5), (6, -1.5)))
