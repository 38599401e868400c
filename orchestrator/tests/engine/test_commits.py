"""What ends or constrains a text does so inside an accepted block as anywhere: every outcome is that of plain decoding.

Requests have seeds, so their tokens are drawn by position and comparing is exact, whatever was drafted.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from orchestrator.engine.request import GrammarSpec, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tags": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
PATTERNS = {
    "all": lambda seed, position: 9,
    "none": lambda seed, position: 0,
    "mixed": lambda seed, position: (3 * seed + 5 * position + position // 4) % 6,
}
CASES = [("all", "alone"), ("mixed", "alone"), ("all", "worker"), ("none", "in order"), ("mixed", "worker")]


def check(kit, model, tokenizer, requests, pattern, **options):
    """Outcomes with drafts equal those without; returns them and the engine."""
    expected = kit.run(kit.engine_of(model, tokenizer, speculation="off"), requests)
    engine = kit.engine_of(model, tokenizer, **options)
    known = {params.seed: [*prompt, *expected[name][0]] for name, (prompt, params) in requests.items()}
    for name, (_, params) in requests.items():
        if expected[name][3].stop_token is not None:
            known[params.seed].append(expected[name][3].stop_token)
    kit.tutor(engine, known, PATTERNS[pattern])
    assert kit.run(engine, requests) == expected
    return expected, engine


def sampled(seed: int, **options) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 40, "ignore_eos": True, "logprobs": 1} | options)


@pytest.mark.parametrize(("pattern", "mode"), CASES)
def test_grammars(kit, nano, tokenizer, pattern, mode):
    schema, closing = GrammarSpec("json_schema", json.dumps(SCHEMA)), GrammarSpec("regex", "(yes|no)", after="</think>")
    digits = GrammarSpec("regex", "[0-9]{2,30}x?")
    requests = {}
    for i in range(11):
        grammar = (closing, closing, schema, digits)[i % 4 if i > 6 else 0]
        requests[str(i)] = ([5, 9, 200, 31], sampled(i, grammar=grammar, max_tokens=150, ignore_eos=False))
    requests["free"] = ([7, 8], sampled(99))
    expected, engine = check(kit, nano, tokenizer, requests, pattern, mode=mode)
    crossed = [text for _, _, text, _ in expected.values() if "</think>" in text]
    assert crossed, "no text came to the end of its reasoning"
    assert sum(end.reason == "stop" for *_, end in expected.values()) > len(crossed)
    if pattern == "all":
        assert engine.stats.accepted > engine.stats.drafts / 2


@pytest.mark.parametrize(("pattern", "mode"), CASES)
def test_stop_strings_and_stop_tokens(kit, nano, tokenizer, pattern, mode):
    plain = {str(i): ([5, 9, i], sampled(i)) for i in range(6)}
    free = kit.run(kit.engine_of(nano, tokenizer, speculation="off"), plain)
    requests = {}
    for i in range(6):
        tokens, _, text, _ = free[str(i)]
        for at in (4, 9, 17):
            requests[f"{i} string {at}"] = ([5, 9, i], sampled(i, stop=(text[at : at + 3],)))
            requests[f"{i} token {at}"] = ([5, 9, i], sampled(i, stop_token_ids=(tokens[at],), min_tokens=at // 2))
    expected, _ = check(kit, nano, tokenizer, requests, pattern, mode=mode)
    assert sum(end.reason == "stop" for *_, end in expected.values()) > 20


@pytest.mark.parametrize(("pattern", "mode"), CASES)
def test_limits(kit, nano, tokenizer, pattern, mode):
    """max_tokens, min_tokens and the context end inside a block of drafts at every offset."""
    requests = {str(n): ([5, 9, 200, 31], sampled(n, max_tokens=n)) for n in range(1, 15)}
    every = tuple(range(256))
    requests |= {
        f"{n} at least": ([5, 9], sampled(100 + n, min_tokens=n, stop_token_ids=every, ignore_eos=False))
        for n in range(1, 9)
    }
    expected, _ = check(kit, nano, tokenizer, requests, pattern, mode=mode)
    assert all(len(expected[str(n)][0]) == n for n in range(1, 15))
    long = {str(i): ([3 + i] * (140 + i), sampled(i, max_tokens=500)) for i in range(8)}
    expected = kit.run(kit.engine_of(nano, tokenizer, max_model_len=150, speculation="off"), long)
    engine = kit.engine_of(nano, tokenizer, max_model_len=150, mode=mode)
    kit.tutor(engine, {i: [*long[str(i)][0], *expected[str(i)][0]] for i in range(8)}, PATTERNS[pattern])
    assert kit.run(engine, long) == expected
    assert [len(expected[str(i)][0]) for i in range(8)] == [10 - i for i in range(8)]


@pytest.mark.parametrize(("pattern", "mode"), CASES)
def test_log_probabilities_and_filters(kit, nano, tokenizer, pattern, mode):
    prompt = kit.prompt_of(20, 1)
    requests = {
        "greedy": (prompt, sampled(1, temperature=0, logprobs=4)),
        "top_p": (prompt, sampled(2, top_p=0.5, logprobs=0)),
        "top_k": (prompt, sampled(3, top_k=3, temperature=1.7, logprobs=20)),
        "prompt": (prompt, sampled(4, prompt_logprobs=True, logprobs=2)),
        "none": (prompt, sampled(5, logprobs=None)),
    }
    expected, _ = check(kit, nano, tokenizer, requests, pattern, mode=mode)
    assert len(expected["prompt"][3].prompt_logprobs) == 20


@pytest.mark.parametrize(("pattern", "mode"), CASES)
def test_preemption_and_chunked_prompts(kit, nano, tokenizer, pattern, mode):
    """Memory for less than half of the requests: parked ones come back without their drafts, and as they were."""
    requests = {str(i): (kit.prompt_of(100 + 30 * i, i), sampled(i, max_tokens=90)) for i in range(6)}
    _, engine = check(
        kit, nano, tokenizer, requests, pattern, mode=mode, num_blocks=5, max_step_tokens=60, chunk_tokens=50
    )
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 1}, {"max_num_seqs": 3, "mode": "worker"}, {"speculation": 2}, {"mode": "in order"}],
)
def test_alone_in_company_and_reordered(kit, nano, tokenizer, options):
    """Requests of different lengths come and go, so a request's row changes from step to step; state goes with it."""
    requests = {str(i): (kit.prompt_of(10 + 9 * i, i), sampled(i, max_tokens=5 + 7 * (i % 4))) for i in range(12)}
    check(kit, nano, tokenizer, requests, "mixed", **options)


@pytest.mark.parametrize("mode", ["alone", "in order", "worker"])
def test_cancelling_in_flight_leaves_the_others_alone(kit, nano, tokenizer, mode):
    requests = {str(i): (kit.prompt_of(12, i), sampled(i)) for i in range(6)}
    expected = kit.run(kit.engine_of(nano, tokenizer, speculation="off"), requests)
    engine = kit.engine_of(nano, tokenizer, mode=mode)
    kit.tutor(engine, {i: requests[str(i)][0] + expected[str(i)][0] for i in range(6)}, PATTERNS["mixed"])
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    early = [event for _ in range(5) for event in engine.step()]
    engine.abort("1"), engine.abort("4"), engine.abort("4")
    rest = kit.finish(engine)
    assert {rest[n][3].reason for n in "14"} == {"abort"}
    for name in "0235":
        begun = [e.token_id for e in early if e.request_id == name and hasattr(e, "token_id")]
        assert begun + rest[name][0] == expected[name][0] and begun


@pytest.mark.parametrize("mode", ["alone", "worker"])
def test_grammars_hold_for_rejection_sampling_too(kit, nano, tokenizer, mode, monkeypatch):
    """Without a seed tokens are accepted or redrawn; every draft place has its mask."""
    rng = random.Random(8)
    monkeypatch.setattr("orchestrator.engine.engine.secrets.randbits", rng.getrandbits)
    pattern = r"(ab|[0-9]{3}){2,5}-(yes|no)"
    params = SamplingParams(max_tokens=60, grammar=GrammarSpec("regex", pattern))
    engine = kit.engine_of(nano, tokenizer, mode=mode)
    outcomes = kit.run(engine, {str(i): ([5, 9, 200, i], params) for i in range(12)})
    ended = [text for _, _, text, end in outcomes.values() if end.reason == "stop"]
    assert len(ended) > 6 and all(re.fullmatch(pattern, text) for text in ended)
    assert engine.stats.drafts > 0
