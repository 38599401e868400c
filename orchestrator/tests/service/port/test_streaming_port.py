"""A prompt computed in one engine and continued in another one gives what one engine gives, over every kind of link."""

from __future__ import annotations

import pytest
from port_kit import (
    KINDS,
    alone,
    ask,
    begin,
    check_nothing_is_left,
    compute,
    eventually,
    hand_over,
    port_of,
    prompt_of,
    spec_of,
)

from orchestrator.engine.request import GrammarSpec, SamplingParams
from orchestrator.roles.engine_port import Drop, Dropped, Expect, Export, Exported, Withdraw

REQUESTS = {
    "greedy": (prompt_of(400, 1), SamplingParams(temperature=0.0, max_tokens=20, seed=1, ignore_eos=True)),
    "sampled": (prompt_of(300, 2), SamplingParams(max_tokens=24, seed=2, ignore_eos=True)),
    "short": ([5, 6, 7], SamplingParams(max_tokens=20, seed=3, ignore_eos=True)),
    "logprobs": (prompt_of(140, 4), SamplingParams(max_tokens=12, seed=4, ignore_eos=True, logprobs=2)),
    "one token": (prompt_of(50, 5), SamplingParams(max_tokens=1, seed=5)),
    "stop tokens": (prompt_of(90, 6), SamplingParams(max_tokens=40, seed=6, stop_token_ids=tuple(range(7, 60)))),
}


def pair(kind, model, tokenizer=None, **options):
    return port_of(model, tokenizer, kind=kind, **options), port_of(model, tokenizer, kind=kind, **options)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_engine(nano, kind, overlap):
    source, target = pair(kind, nano, overlap=overlap)
    try:
        for name, (prompt, params) in REQUESTS.items():
            assert hand_over(source, target, spec_of(prompt, params)) == alone(nano, prompt, params), name
            check_nothing_is_left(source, target)
        assert source.departures.counts["handoffs out"] == target.arrivals.counts["handoffs in"] == len(REQUESTS) - 1
        assert source.departures.counts["bytes out"] == target.arrivals.counts["bytes in"] > 0
        assert (source.departures.counts["bytes out ahead"] > 0) is overlap
    finally:
        source.close()
        target.close()


@pytest.mark.parametrize("what", ["speculation", "grammar", "stop strings"])
def test_more_of_a_request_travels(nano, tokenizer, what):
    options = {"speculation": 3} if what == "speculation" else {}
    params = {
        "speculation": SamplingParams(max_tokens=40, seed=1, ignore_eos=True),
        "grammar": SamplingParams(max_tokens=60, seed=6, grammar=GrammarSpec("regex", "[a-d]{40}")),
        "stop strings": SamplingParams(max_tokens=80, seed=7, stop=("a", "e"), min_tokens=3),
    }[what]
    source, target = pair("shared", nano, tokenizer, **options)
    try:
        spec = spec_of(prompt_of(200, 1), params)
        assert hand_over(source, target, spec) == alone(nano, list(spec.prompt), params, tokenizer, **options)
        check_nothing_is_left(source, target)
    finally:
        source.close()
        target.close()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_long_prompt_are_at_the_target_before_it_is_computed(nano, kind):
    prompt, params = prompt_of(1000, 1), SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    source, target = pair(kind, nano)
    try:
        spec = spec_of(prompt, params)
        began = begin(source, spec)
        target.do(Expect("r", 1, began.ticket))
        at = 0
        for upto in (260, 520, 780):
            compute(source, spec, upto=upto, start=at)
            at = upto
            fetch = target.arrivals.fetches["r", 1]
            made = source.departures.ships["r", 1].size
            eventually(lambda fetch=fetch, made=made: fetch.size == made, "what was computed is at the target")
        assert target.arrivals.fetches["r", 1].size > 0 and not target.arrivals.fetches["r", 1].complete
        compute(source, spec, start=at)
        exported = ask(source, Export("r", 1), Exported)
        numbers = source.numbers()
        assert 0 < numbers["bytes out taken ahead"] <= numbers["bytes out ahead"] < numbers["bytes out"]
        assert exported.manifest is not None
        ask(source, Drop("r", 1), Dropped)
        source.do(Withdraw("r", 1))
        ask(target, Drop("r", 1), Dropped)
        check_nothing_is_left(source, target)
    finally:
        source.close()
        target.close()
