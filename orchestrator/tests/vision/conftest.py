"""A small model that sees, images of every kind, and engines over it."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.launch import InOrder, Worker
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano
from orchestrator.model.vision import PreparedImage, prepare
from orchestrator.vision import place

# The oracle stands beside the tests of the whole project, which the orchestrator's own settings do not name.
sys.path.append(str(Path(__file__).parents[3] / "tests"))


def seeing(**numbers):
    """v41-nano with a tower, whose images are small: at most 40 tokens."""
    config = v41_nano(vision=True)
    given = {"min_pixels": 14 * 14 * 12, "max_image_tokens": 40, **numbers}
    return replace(config, vision=replace(config.vision, **given))


@pytest.fixture(scope="session")
def nano_path(tmp_path_factory):
    return make_model(seeing(), tmp_path_factory.mktemp("nano-vision"), seed=20)


@pytest.fixture(scope="session")
def nano(nano_path):
    return load_model(nano_path)


@pytest.fixture(scope="session")
def tokenizer(nano_path):
    from orchestrator.text.tokenizer import load_tokenizer

    return load_tokenizer(nano_path)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def prompt_of(config, parts: list[int | PreparedImage], seed: int = 0):
    """A prompt of so many text tokens and images, in order: (tokens, placed images)."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, PreparedImage):
            tokens.append(config.image_token_id)
            images.append(part)
        else:
            tokens += rng.integers(3, 400, part).tolist()
    return place(tokens, images, config.image_token_id)


def engine_of(model, mode: str = "alone", tokenizer=None, **options) -> Engine:
    """`mode`: "alone" one step after the other, "in order" the pipeline on one thread, "worker" with one behind."""
    engine = Engine(model, tokenizer, EngineConfig(**{"num_blocks": 48, "max_num_seqs": 8} | options))
    if mode != "alone":
        engine.overlap(Worker() if mode == "worker" else InOrder())
    return engine


def greedy(count: int = 10, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0} | fields)


def run(engine: Engine, requests: dict) -> dict:
    """(tokens, log-probabilities, end) of every request; a request is (prompt, params) or (prompt, params, images)."""
    for name, (prompt, params, *images) in requests.items():
        engine.add(name, list(prompt), params, images=images[0] if images else ())
    tokens: dict = {name: [] for name in requests}
    logprobs: dict = {name: [] for name in requests}
    ends: dict = {}
    for _ in range(5000):
        if not engine.has_work:
            break
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
                logprobs[event.request_id].append(event.logprob)
            elif isinstance(event, Finished):
                ends[event.request_id] = event
    assert not engine.has_work and engine.scheduler.blocks.used == engine.scheduler.slots.used == 0
    if engine.images is not None:
        assert engine.images.counters.held_bytes == 0, "a request that has ended holds embeddings"
    return {name: (tokens[name], logprobs[name], ends[name]) for name in requests}


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The functions above, for test modules, which cannot import this one."""
    return SimpleNamespace(
        seeing=seeing, noise=noise, encoded=encoded, prompt_of=prompt_of, engine_of=engine_of, greedy=greedy, run=run
    )


@pytest.fixture
def picture(nano, kit):
    """Prepared images of the small model, by size and seed."""
    return lambda width=100, height=80, seed=0: prepare(kit.noise(width, height, seed), nano.config.vision)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
