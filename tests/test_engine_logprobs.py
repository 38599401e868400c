"""Reported log-probabilities are those of the logits, wherever the rows were computed."""

from __future__ import annotations

import random

import pytest
import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import Finished, GrammarSpec, Ready, SamplingParams, TokenOutput
from orchestrator.model.record import Recorder
from orchestrator.text.tokenizer import load_tokenizer

LENGTH, OUTPUT = 300, 5


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    return [random.Random(seed).randrange(3, 480) for _ in range(length)]


def run(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]], recorder: Recorder | None = None):
    """Tokens and the last event of each request; `recorder` follows the first."""
    tokens: dict[str, list[TokenOutput]] = {name: [] for name in requests}
    last: dict[str, Finished] = {}
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params, recorder=recorder)
        recorder = None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event)
            elif isinstance(event, Finished):
                last[event.request_id] = event
    return tokens, last


def engine_of(model, chunk: int = 512, tokenizer=None, **options) -> Engine:
    return Engine(
        model, tokenizer, EngineConfig(num_blocks=32, chunk_tokens=chunk, max_step_tokens=max(16, chunk), **options)
    )


@pytest.fixture(scope="module")
def exact(nano) -> tuple[torch.Tensor, list[float]]:
    """Log-softmax [LENGTH + OUTPUT - 1, vocab] of prompt 0 and its output, and the log-probabilities of the prompt."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, prompt_logprobs=True)
    recorder = Recorder()
    tokens, last = run(engine_of(nano, decoder_prefill="exact"), {"r": (prompt_of(0), params)}, recorder)
    record = recorder.export()
    logits = record["logits"]
    assert record["logits/positions"].tolist() == list(range(LENGTH + OUTPUT - 1))
    assert [t.logprob for t in tokens["r"]] == [None] * OUTPUT
    return torch.log_softmax(logits.double(), dim=1), list(last["r"].prompt_logprobs)


def test_prompt_logprobs_are_the_log_softmax_of_exact_logits(exact):
    table, prompt_logprobs = exact
    prompt = prompt_of(0)
    assert prompt_logprobs[0] is None and len(prompt_logprobs) == LENGTH
    assert prompt_logprobs[1:] == [float(table[i, prompt[i + 1]]) for i in range(LENGTH - 1)]


@pytest.mark.parametrize(("chunk", "mode"), [(1, "exact"), (7, "bounded"), (128, "exact"), (299, "bounded")])
def test_prompt_logprobs_do_not_depend_on_chunks(nano, exact, chunk, mode):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=True)
    _, last = run(engine_of(nano, chunk, decoder_prefill=mode), {"r": (prompt_of(0), params)})
    assert list(last["r"].prompt_logprobs) == exact[1]


@pytest.mark.parametrize("chunk", [50, 512])
def test_prompt_logprobs_in_a_mixed_batch(nano, exact, chunk):
    wants = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=True)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    short = prompt_of(9, 1)
    requests = {"a": (prompt_of(1, 20), plain), "r": (prompt_of(0), wants), "b": (prompt_of(2, 170), plain)}
    requests |= {"one": (short, wants), "c": (prompt_of(3, 3), plain)}
    tokens, last = run(engine_of(nano, chunk, max_num_seqs=4), requests)
    assert list(last["r"].prompt_logprobs) == exact[1]
    assert last["one"].prompt_logprobs == (None,)
    for name, request in requests.items():
        alone, _ = run(engine_of(nano, max_num_seqs=1), {name: request})
        assert [(t.token_id, t.logprob, t.top_logprobs) for t in tokens[name]] == [
            (t.token_id, t.logprob, t.top_logprobs) for t in alone[name]
        ]


def test_prompt_logprobs_survive_a_park_in_the_middle_of_the_prompt(nano, exact):
    engine = Engine(nano, None, EngineConfig(num_blocks=6, max_num_seqs=2, chunk_tokens=250, max_step_tokens=250))
    engine.add("old", prompt_of(5, 250), SamplingParams(max_tokens=140, seed=2, ignore_eos=True))
    events, parked_at = engine.step(), set()
    engine.scheduler.chunk_tokens = 2
    wants = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=True)
    engine.add("r", prompt_of(0), wants)
    while engine.has_work:
        events += engine.step()
        parked_at.update(s.computed for s in engine.scheduler.parked)
    assert len(parked_at) == 1 and 0 < parked_at.pop() < LENGTH
    assert sum(isinstance(e, Ready) for e in events) == 2
    last = next(e for e in events if isinstance(e, Finished) and e.request_id == "r")
    assert list(last.prompt_logprobs) == exact[1]


@pytest.mark.parametrize("wanted", [0, 1, 5, 20])
def test_logprobs_of_tokens_and_alternatives(nano, exact, wanted):
    """Whatever temperature and filters do, they are those of the model."""
    for temperature in (0.0, 1.5):
        params = SamplingParams(
            temperature=temperature, top_p=0.8, seed=1, max_tokens=OUTPUT, ignore_eos=True, logprobs=wanted
        )
        recorder = Recorder()
        tokens, _ = run(engine_of(nano, decoder_prefill="exact"), {"r": (prompt_of(0), params)}, recorder)
        table = torch.log_softmax(recorder.export()["logits"].double(), dim=1)
        for row, token in zip(table, tokens["r"], strict=True):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-5)
            best = row.sort(descending=True, stable=True)
            assert [i for i, _ in token.top_logprobs] == best.indices[:wanted].tolist()
            assert [p for _, p in token.top_logprobs] == pytest.approx(best.values[:wanted].tolist(), abs=1e-5)


def test_a_grammar_that_leaves_few_tokens_gives_few_alternatives(nano, nano_path):
    engine = engine_of(nano, tokenizer=load_tokenizer(nano_path))
    params = SamplingParams(seed=1, max_tokens=9, logprobs=20, grammar=GrammarSpec("regex", "[ab]{4}"))
    tokens, last = run(engine, {"r": (prompt_of(0, 9), params)})
    assert last["r"].reason == "stop" and tokens["r"]
    for token in tokens["r"]:
        ids = dict(token.top_logprobs)
        assert 0 < len(ids) < 20 and min(ids) >= 0 and token.token_id in ids
        assert sum(torch.tensor(list(ids.values())).exp()) == pytest.approx(1, abs=1e-5)
