"""Reproducible mode: how a prompt is cut and who shares the batch changes no bit of the result."""

from __future__ import annotations

import random

import pytest
import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.model.record import Recorder

PROMPT = 700
OUTPUT = 4
MODES = ("exact", "bounded")


def prompt_for(model, length: int = PROMPT, seed: int = 3) -> list[int]:
    return [random.Random(seed).randrange(model.config.vocab_size) for _ in range(length)]


def engine_for(model, chunk: int, **options) -> Engine:
    budget = max(chunk, 16)
    config = EngineConfig(chunk_tokens=chunk, max_step_tokens=budget, num_blocks=64, **options)
    return Engine(model, None, config)


def logits_of(model, prompt: list[int], chunk: int, **options) -> torch.Tensor:
    """Logits [OUTPUT, vocab] of a greedy continuation."""
    engine, recorder = engine_for(model, chunk, max_num_seqs=1, **options), Recorder()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    engine.add("r", prompt, params, recorder=recorder)
    while engine.has_work:
        engine.step()
    return recorder.export()["logits"]


def tokens_of(engine: Engine, prompts: dict[str, list[int]], params: dict[str, SamplingParams]) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        engine.add(name, prompt, params[name])
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
            elif isinstance(event, Finished):
                assert event.reason == "length", event
    return tokens


@pytest.mark.parametrize("mode", MODES)
def test_every_chunk_size_gives_the_same_bits(nano, mode):
    prompt = prompt_for(nano)
    whole = logits_of(nano, prompt, PROMPT, decoder_prefill=mode)
    assert whole.shape == (OUTPUT, nano.config.vocab_size) and whole.isfinite().all()
    different = [n for n in range(1, 301) if not logits_of(nano, prompt, n, decoder_prefill=mode).equal(whole)]
    assert different == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 128, 129, 133, 134, 135, 141, 300])
def test_chunk_sizes_with_production_rows(mini, mode, chunk):
    prompt = prompt_for(mini)
    whole = logits_of(mini, prompt, PROMPT, decoder_prefill=mode)
    assert logits_of(mini, prompt, chunk, decoder_prefill=mode).equal(whole)


def test_bounded_prefill_differs_from_exact_only_beyond_its_reach(nano):
    keep = nano.config.keep_tokens
    short, long = prompt_for(nano, keep), prompt_for(nano, 8 * keep)
    assert logits_of(nano, short, 512, decoder_prefill="bounded").equal(
        logits_of(nano, short, 512, decoder_prefill="exact")
    )
    assert not logits_of(nano, long, 512, decoder_prefill="bounded").equal(
        logits_of(nano, long, 512, decoder_prefill="exact")
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone_and_among_fifteen_others(mini, temperature):
    lengths = [1, 2, 127, 128, 129, 135, 200, 257, 31, 64, 90, 300, 3, 5, 140, 17]
    prompts = {str(i): prompt_for(mini, n, seed=i) for i, n in enumerate(lengths)}
    params = {
        name: SamplingParams(temperature=temperature, top_p=0.9, max_tokens=12, seed=int(name), ignore_eos=True)
        for name in prompts
    }
    together = tokens_of(engine_for(mini, 96, max_num_seqs=16), prompts, params)
    for name in ("0", "2", "4", "7", "14"):
        alone = tokens_of(engine_for(mini, 500, max_num_seqs=1), {name: prompts[name]}, {name: params[name]})
        assert alone[name] == together[name]


def test_preemption_loses_nothing(mini):
    prompts = {str(i): prompt_for(mini, 150 + 20 * i, seed=i) for i in range(4)}
    params = {n: SamplingParams(temperature=1.0, max_tokens=150, seed=int(n), ignore_eos=True) for n in prompts}
    roomy = tokens_of(engine_for(mini, 128, max_num_seqs=4), prompts, params)
    tight = Engine(mini, None, EngineConfig(chunk_tokens=128, max_step_tokens=128, num_blocks=5, max_num_seqs=4))
    assert tokens_of(tight, prompts, params) == roomy
    assert tight.stats.preemptions > 0
    assert tight.scheduler.blocks.used == tight.scheduler.slots.used == 0


def test_library_products_differ_by_rounding_only(nano_path, nano):
    from orchestrator.model.load import load_model

    prompt = prompt_for(nano, 40)
    options = {"quantised_caches": False, "decoder_prefill": "exact"}
    fixed = logits_of(nano, prompt, 64, **options)[0]
    library = logits_of(load_model(nano_path, dense="library"), prompt, 64, **options)[0]
    assert (fixed - library).abs().max() <= 1e-4 * fixed.abs().max()
