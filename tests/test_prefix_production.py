"""Prefix hits with production rows: windows of 128, rings of 134, blocks of 113,920 bytes."""

from __future__ import annotations

import random

import pytest

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.engine.scheduler import Step


def engine_for(model, mode: str, **options) -> Engine:
    engine = Engine(model, None, EngineConfig(num_blocks=32, max_num_seqs=2, prefix_cache=mode, **options))
    if engine.prefix is not None:
        engine.prefix.stride = 256
    return engine


def run(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[tuple[int, float | None]], int]:
    """Tokens with the bits of their log-probabilities, and cached tokens."""
    engine.add("r", prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0))
    return finish(engine)


def finish(engine: Engine) -> tuple[list[tuple[int, float | None]], int]:
    found, cached = [], 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                found.append((event.token_id, event.logprob))
            elif isinstance(event, Finished):
                cached = event.cached_tokens
    assert engine.scheduler.blocks.used == 0
    return found, cached


@pytest.mark.parametrize(("mode", "cold"), [("exact", "off"), ("canonical", "canonical")])
def test_hot_equals_cold(mini, mode, cold):
    engine, draw = engine_for(mini, mode), random.Random(1)
    prompt = [draw.randrange(mini.config.vocab_size) for _ in range(560)]
    hits = []
    for _ in range(2):
        expected, _ = run(engine_for(mini, cold), prompt, 12)
        for _ in range(2):
            found, cached = run(engine, prompt, 12)
            assert found == expected, cached
            hits.append(cached)
        prompt = prompt + [token for token, _ in found] + [draw.randrange(mini.config.vocab_size) for _ in range(90)]
    assert hits == ([0, 384, 512, 512] if mode == "exact" else [0, 512, 512, 512])


@pytest.mark.parametrize("mode", ["bounded", "canonical"])
def test_parked_before_its_replay_has_begun(mini, mode):
    """The first step of a hit stands a whole block below its end: that block is held all the same."""
    draw, outcomes = random.Random(2), []
    prompt = [draw.randrange(mini.config.vocab_size) for _ in range(530)]
    for park in (False, True):
        engine = engine_for(mini, mode, window_bytes=0, chunk_tokens=32)
        run(engine, prompt, 1)
        engine.add("r", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0))
        step = engine.scheduler.schedule()
        sequence = engine.scheduler.running[0]
        assert sequence.hit == 512 and sequence.computed == 384
        if park:
            step = Step()
            engine.scheduler._park(sequence, step)
        engine._run(step)
        if park:
            blocks = engine.scheduler.blocks
            ids = blocks.take(blocks.free)
            for pool in engine.cache.pools.values():
                pool.main.fill_(0x55)
                pool.index.fill_(0x55)
            blocks.give(ids)
        outcomes.append(finish(engine))
    assert outcomes[0] == outcomes[1] and outcomes[0][1] == 512
