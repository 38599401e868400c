"""Prompts with images through two ports: embeddings come by value, spans travel, nothing is encoded again."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from port_kit import KINDS, alone, ask, begin, check_nothing_is_left, hand_over, port_of, spec_of

from orchestrator.engine.handoff.pictures import image_bytes
from orchestrator.engine.request import SamplingParams
from orchestrator.model.vision import prepare
from orchestrator.model.vision.encoder import VisionEncoder
from orchestrator.roles.engine_port import Began, Begin, Drop, Dropped
from orchestrator.vision import place

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def prompt(seeing):
    """(tokens, placed images): text, an image, text, the same one and another side by side, text."""
    config = seeing.config

    def picture(seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (80, 100, 3), dtype=np.uint8)
        return prepare(Image.fromarray(pixels), config.vision)

    rng, mark = np.random.default_rng(1), config.image_token_id
    text = [rng.integers(3, 400, n).tolist() for n in (40, 150, 7)]
    return place([*text[0], mark, *text[1], mark, mark, *text[2]], [picture(1), picture(1), picture(2)], mark)


@pytest.fixture(scope="module")
def embeddings(seeing, prompt):
    encoder = VisionEncoder(seeing.weights)
    return tuple({p.image.digest.hex(): image_bytes(encoder.encode(p.image)) for p in prompt[1]}.items())


@pytest.fixture
def blind(seeing, monkeypatch):
    """Engines that know the vision config, and have no encoder."""
    monkeypatch.setattr(seeing.weights, "vision", None)
    return seeing


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_engine(seeing, prompt, embeddings, kind, overlap, monkeypatch):
    expected = alone(seeing, prompt[0], PARAMS, images=prompt[1])
    monkeypatch.setattr(seeing.weights, "vision", None)
    source, target = (port_of(seeing, kind=kind, overlap=overlap) for _ in range(2))
    assert source.engine.images.encoder is None
    try:
        spec = spec_of(prompt[0], PARAMS, tuple(prompt[1]))
        assert len(spec.images) == 2
        assert hand_over(source, target, spec, embeddings=embeddings) == expected
        check_nothing_is_left(source, target)
    finally:
        source.close()
        target.close()


def test_embeddings_that_are_none_are_refused_with_nothing_held(blind, prompt, embeddings):
    port = port_of(blind)
    try:
        spec = spec_of(prompt[0], PARAMS, tuple(prompt[1]))
        (first, rows), second = embeddings
        for wrong in ((), (second,), ((first, rows[:-2]), second), ((first, b""), second)):
            began = begin(port, spec, embeddings=wrong)
            assert "embedding" in began.why and not began.retry
            ask(port, Drop("r", 1), Dropped)
            check_nothing_is_left(port)
        moved = tuple(type(p)(p.start + 1, p.image) for p in prompt[1])
        began = begin(port, spec_of(prompt[0], PARAMS, moved), embeddings=embeddings)
        assert "not an image's" in began.why and not began.retry
        check_nothing_is_left(port)
    finally:
        port.close()


def test_a_prompt_that_the_engine_refuses_gives_its_embeddings_back(blind, prompt, embeddings):
    port = port_of(blind, max_waiting=1)
    try:
        spec = spec_of(prompt[0], PARAMS, tuple(prompt[1]))
        assert not ask(port, Begin("a", 1, spec, embeddings=embeddings), Began).why
        held = port.engine.images.counters.held_bytes
        began = ask(port, Begin("b", 1, spec, embeddings=embeddings), Began)
        assert began.why and began.retry
        assert port.engine.images.counters.held_bytes == held > 0
        ask(port, Drop("a", 1), Dropped)
        ask(port, Drop("b", 1), Dropped)
        check_nothing_is_left(port)
    finally:
        port.close()


def test_an_engine_without_encoder_takes_no_pixels(blind, prompt):
    from port_kit import engine_of

    engine = engine_of(blind)
    with pytest.raises(ValueError, match="encoder is elsewhere"):
        engine.add("r", prompt[0], PARAMS, images=prompt[1])
    assert engine.images.counters.held_bytes == 0 and not engine.has_work
