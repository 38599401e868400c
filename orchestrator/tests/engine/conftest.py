"""Small models, engines over them, and a drafter that is right exactly as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.launch import InOrder, Worker
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.engine.rules import Rules
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano


@pytest.fixture(scope="session")
def nano_path(tmp_path_factory):
    return make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)


@pytest.fixture(scope="session")
def nano(nano_path):
    return load_model(nano_path)


@pytest.fixture(scope="session")
def tokenizer(nano_path):
    from orchestrator.text.tokenizer import load_tokenizer

    return load_tokenizer(nano_path)


@pytest.fixture(scope="session")
def nano7(tmp_path_factory):
    """The same with draft blocks of seven, and so larger rings and tails."""
    config = replace(v41_nano(), dspark_block_size=7, draft_length=7)
    return load_model(make_model(config, tmp_path_factory.mktemp("nano7"), seed=20))


def prompt_of(length: int, seed: int, vocab: int = 500) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(vocab) for _ in range(length)]


def engine_of(model, tokenizer=None, *, mode: str = "alone", rules: Rules | None = None, **options) -> Engine:
    """`mode`: "alone" one step after the other, "in order" the pipeline on one thread, "worker" with one behind."""
    engine = Engine(model, tokenizer, EngineConfig(**{"num_blocks": 48, "max_num_seqs": 8} | options))
    if mode != "alone":
        engine.overlap(Worker() if mode == "worker" else InOrder(), rules)
    return engine


Outcome = tuple[list[int], list[float], str, Finished]


def run(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Outcome]:
    """Tokens, log-probabilities, text and last event of every request, all added at once."""
    for name, (prompt, params) in requests.items():
        engine.add(name, list(prompt), params)
    return finish(engine)


def finish(engine: Engine) -> dict[str, Outcome]:
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    ends: dict[str, Finished] = {}
    for _ in range(20_000):
        if not engine.has_work:
            break
        for event in engine.step():
            name = event.request_id
            assert name not in ends, f"{name}: {event} after its end"
            if isinstance(event, TokenOutput):
                tokens.setdefault(name, []).append(event.token_id)
                logprobs.setdefault(name, []).append(event.logprob)
                texts[name] = texts.get(name, "") + event.text
            elif isinstance(event, Finished):
                ends[name] = event
                texts[name] = texts.get(name, "") + event.text
    assert not engine.has_work, "work is left and nothing moves"
    assert engine.scheduler.blocks.used == engine.scheduler.slots.used == 0
    return {name: (tokens.get(name, []), logprobs.get(name, []), texts.get(name, ""), ends[name]) for name in ends}


def tutor(engine: Engine, known: dict[int, list[int]], right: Callable[[int, int], int]) -> None:
    """Let the drafter know the answers: `known` is seed -> prompt and output, of requests with seeds of their own.

    `right(seed, position)` drafts behind the anchor at `position` are right, the next one is wrong.
    """
    drafter = engine.speculator.drafter
    original, vocab = drafter.propose, drafter.config.vocab_size

    def propose(block, temperature, top_p, top_k, seeds, **options):
        proposed = original(block, temperature, top_p, top_k, seeds, **options)
        tokens = proposed.records.tokens
        for row, (seed, position) in enumerate(zip(seeds.tolist(), block.positions.tolist(), strict=True)):
            if seed not in known:
                continue
            for k in range(tokens.shape[1]):
                at = position + 1 + k
                answer = known[seed][at] if at < len(known[seed]) else 0
                tokens[row, k] = answer if k < right(seed, position) else (answer + 1) % vocab
        return proposed

    drafter.propose = propose


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The functions above, for test modules, which cannot import this one."""
    return SimpleNamespace(engine_of=engine_of, prompt_of=prompt_of, run=run, finish=finish, tutor=tutor)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
