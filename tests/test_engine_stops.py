"""How a text ends: by a token, by a string, by a limit; and its text is exactly what its tokens say."""

from __future__ import annotations

import random

import pytest

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.text.tokenizer import load_tokenizer

PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def engine(nano, nano_path) -> Engine:
    return Engine(nano, load_tokenizer(nano_path), EngineConfig(num_blocks=32, max_num_seqs=8))


def run(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> tuple[list[int], str, Finished]:
    """Token ids, the whole text and the last event of one request."""
    engine.add("r", prompt, params)
    ids, text, last = [], "", None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                ids.append(event.token_id)
                text += event.text
            elif isinstance(event, Finished):
                text, last = text + event.text, event
    assert engine.scheduler.slots.used == engine.scheduler.blocks.used == 0
    assert last is not None
    return ids, text, last


def free(engine: Engine, seed: int, count: int = 40, **options) -> tuple[list[int], str, Finished]:
    """A continuation that nothing ends but its length."""
    return run(engine, SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, **options))


@pytest.mark.parametrize("seed", range(3))
def test_text_is_the_decoding_of_the_ids(engine, seed):
    ids, text, last = free(engine, seed)
    assert text == engine.tokenizer.decode(ids)
    assert (last.reason, last.completion_tokens, last.prompt_tokens) == ("length", 40, len(PROMPT))


@pytest.mark.parametrize("seed", range(2))
def test_a_stop_token_ends_the_text_and_is_not_part_of_it(engine, seed):
    ids, _, _ = free(engine, seed)
    stop = ids[7]
    kept, text, last = run(engine, SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, stop_token_ids=(stop,)))
    assert kept == ids[: ids.index(stop)]
    assert (last.reason, last.stop_token, last.completion_tokens) == ("stop", stop, len(kept) + 1)
    assert text == engine.tokenizer.decode(kept)


def test_end_of_text_is_a_stop_token_unless_ignored(engine, monkeypatch):
    ids, _, _ = free(engine, 1)
    monkeypatch.setattr(engine.sampler, "eos", (ids[5],))
    first = ids.index(ids[5])
    kept, _, last = run(engine, SamplingParams(max_tokens=40, seed=1))
    assert (kept, last.reason, last.stop_token) == (ids[:first], "stop", ids[5])
    assert free(engine, 1)[0] == ids


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_string_across_token_borders(engine, seed):
    ids, text, _ = free(engine, seed)
    rng = random.Random(seed)
    for _ in range(4):
        begin = rng.randrange(len(text) - 6)
        stop = text[begin : begin + rng.randrange(1, 6)]
        kept, got, last = run(engine, SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, stop=(stop, "\0never")))
        assert got == text[: text.index(stop)]
        assert (last.reason, last.stop_sequence, last.stop_token) == ("stop", stop, None)
        assert kept == ids[: len(kept)] and stop in engine.tokenizer.decode(kept)
        assert "\ufffd" in stop or stop not in engine.tokenizer.decode(kept[:-1])  # ended at once


def test_what_looked_like_a_stop_string_comes_at_the_end(engine):
    _, text, _ = free(engine, 2)
    _, got, last = run(engine, SamplingParams(max_tokens=40, seed=2, ignore_eos=True, stop=(text[-4:] + "\0",)))
    assert got == text and last.text and last.reason == "length"


@pytest.mark.parametrize("seed", range(2))
def test_no_end_token_before_min_tokens(engine, seed):
    every = tuple(range(256))  # half of all tokens would end the text
    options = {"max_tokens": 30, "seed": seed, "stop_token_ids": every}
    for least in (0, 1, 12, 30):
        ids, _, last = run(engine, SamplingParams(min_tokens=least, **options))
        assert last.completion_tokens >= least
        assert not set(ids) & {*every, *engine.sampler.eos}
        assert last.reason == ("length" if len(ids) == 30 else "stop")


def test_no_stop_string_before_min_tokens(engine):
    ids, text, _ = free(engine, 3)
    tokenizer = engine.tokenizer
    stop = tokenizer.decode(ids[4:5])
    least = 20
    head = tokenizer.decode(ids[: least - 1])
    assert stop in head
    params = SamplingParams(max_tokens=40, min_tokens=least, seed=3, ignore_eos=True, stop=(stop,))
    kept, got, last = run(engine, params)
    assert len(kept) >= least and got.startswith(head.rstrip("\ufffd"))
    end = text.find(stop, len(head))
    assert got == (text if end < 0 else text[:end])
    assert last.reason == ("length" if end < 0 else "stop")


def test_ignoring_the_end_leaves_the_distribution_alone(engine):
    assert free(engine, 4)[0] == free(engine, 4, min_tokens=40)[0]


def test_max_tokens_is_cut_to_the_context(nano):
    engine = Engine(nano, None, EngineConfig(num_blocks=2, max_model_len=150, max_num_seqs=2))
    prompt = [1 + i % 300 for i in range(140)]
    ids, _, last = run(engine, SamplingParams(max_tokens=1000, seed=0, ignore_eos=True), prompt)
    assert (len(ids), last.reason) == (10, "length")
    ids, _, last = run(engine, SamplingParams(max_tokens=1000, seed=0, ignore_eos=True), (prompt * 2)[:149])
    assert (len(ids), last.reason) == (1, "length")


def test_the_whole_cache_can_be_one_request(nano):
    engine = Engine(nano, None, EngineConfig(num_blocks=2, max_num_seqs=2))
    assert engine.context == 256
    ids, _, last = run(engine, SamplingParams(max_tokens=1000, seed=0, ignore_eos=True), [7] * 250)
    assert (len(ids), last.reason) == (6, "length")


def test_a_tiny_top_p_keeps_the_likeliest(engine):
    best, _, _ = run(engine, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for top_p in (1e-4, 1e-60):
        assert run(engine, SamplingParams(top_p=top_p, seed=1, max_tokens=8, ignore_eos=True))[0] == best
    assert run(engine, SamplingParams(top_k=1, seed=1, max_tokens=8, ignore_eos=True))[0] == best
