"""Prompts with images: their embeddings and places travel, since a replay, Engram and cache keys need them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from PIL import Image

from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.messages import Offer, Picture, decode, encode
from orchestrator.engine.handoff.parts import FORMAT, HandoffRefused, handoff_of, open_part, seal_part
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano
from orchestrator.model.vision import prepare
from orchestrator.vision import place


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    config = v41_nano(vision=True)
    config = replace(config, vision=replace(config.vision, min_pixels=14 * 14 * 12, max_image_tokens=40))
    return load_model(make_model(config, tmp_path_factory.mktemp("seeing"), seed=20))


@pytest.fixture(scope="module")
def prompt(seeing):
    """(tokens, placed images): text, an image, text, the same one and another side by side, text."""
    config = seeing.config

    def picture(seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (80, 100, 3), dtype=np.uint8)
        return prepare(Image.fromarray(pixels), config.vision)

    rng, mark = np.random.default_rng(1), config.image_token_id
    text = [rng.integers(3, 400, n).tolist() for n in (40, 150, 7)]
    images = [picture(1), picture(1), picture(2)]
    return place([*text[0], mark, *text[1], mark, mark, *text[2]], images, mark)


def greedy(tokens=12):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def tokens_of(events):
    return [event.token_id for event in events if isinstance(event, TokenOutput)]


@pytest.mark.parametrize("form", ["full", "tokens"])
@pytest.mark.parametrize("prefix", ["off", "exact"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_tokens_of_one_that_stayed(kit, seeing, prompt, form, prefix, steps):
    """Moved within an image, between images, behind the prompt and in the midst of the answer."""
    options = {"chunk_tokens": 100, "speculation": 3, "prefix_cache": prefix}
    outcomes = []
    for moved in (False, True):
        one, other = (kit.engine_of(seeing, **options) for _ in range(2))
        one.add("r", prompt[0], greedy(), images=prompt[1])
        events = [event for _ in range(steps) for event in one.step()]
        if moved:
            door = Handoffs(one)
            parts = door.give("r", form)
            assert sum(name.startswith("image/") for name, _ in parts) == 3
            Handoffs(other).take(parts)
            assert door.conclude("r", taken=True)
            assert one.images.counters.held_bytes == 0 and one.scheduler.blocks.used == 0
            assert other.images.counters.held_bytes > 0 and other.images.counters.patches == 0  # nothing encoded again
            one = other
        while one.has_work:
            events += one.step()
        assert one.images.counters.held_bytes == 0
        outcomes.append(tokens_of(events))
    assert outcomes[0] == outcomes[1] and len(outcomes[0]) == 12


def test_prefill_without_decoder_and_replay(kit, seeing, prompt):
    """The replay reads images again; a receiver with all of the prompt in its replay has the tokens of a cold one."""
    short = (prompt[0][-40:], [replace(i, start=i.start - len(prompt[0]) + 40) for i in prompt[1][2:]])
    assert short[1][0].start > 0 and short[1][0].end < 40
    for tokens, images in (short, prompt):
        expected = kit.engine_of(seeing)
        expected.add("r", tokens, greedy(), images=images)
        one, other = kit.engine_of(seeing), kit.engine_of(seeing)
        one.add("r", tokens, greedy(), images=images, leaves_at=0)
        while one.has_work:
            one.step()
        Handoffs(other).take(Handoffs(one).give("r", "replay"))
        found = kit.finish(other)["r"][0]
        assert len(found) == 12 and (len(tokens) > 44 or found == kit.finish(expected)["r"][0])


def test_refused(kit, nano, seeing, prompt):
    """Engines without an encoder or without room for embeddings, and places that are none."""
    one = kit.engine_of(seeing)
    one.add("r", prompt[0], greedy(), images=prompt[1])
    one.step()
    parts = Handoffs(one).give("r")
    rows = sum(len(data) for name, data in parts if name == "image/0")
    tight = kit.engine_of(seeing, image_bytes=rows)
    with pytest.raises(HandoffRefused) as error:
        Handoffs(tight).take(parts)
    assert error.value.reason == "room" and tight.images.counters.held_bytes == 0
    assert tight.scheduler.blocks.used == tight.scheduler.slots.used == 0 and not tight._sequences
    with pytest.raises(HandoffRefused):
        Handoffs(kit.engine_of(nano)).take(parts)
    other = kit.engine_of(seeing)
    door, handoff = Handoffs(other), handoff_of(parts[0].data)
    offer = decode(open_part(FORMAT, handoff, 0, *parts[0]), Offer)
    first = offer.pictures[0]
    for wrong in (
        Picture(first.start, 0, first.digest, 1, 1), Picture(-1, 5, first.digest, 1, 1), Picture(0, 5, b"short", 1, 1),
        Picture(len(prompt[0]) - 2, 5, first.digest, 1, 1),
    ):  # fmt: skip
        changed = encode(msgspec.structs.replace(offer, pictures=[wrong]))
        with pytest.raises(HandoffRefused) as error:
            door.reserve(*seal_part(FORMAT, handoff, 0, "offer", changed))
        assert error.value.reason == "state"
    with pytest.raises(HandoffRefused):
        door.take([part for part in parts if part.name != "image/1"])
    assert door.take(parts) == "r"
