"""Prompts with images, log-probabilities and a grammar through two groups: as from one engine."""

from __future__ import annotations

from dataclasses import replace as with_fields

import numpy as np
import pytest
from PIL import Image as Picture
from service_kit_ep import CONFIG, empty, group

from orchestrator.engine.engine import Engine
from orchestrator.engine.handoff.pictures import image_bytes
from orchestrator.engine.request import Finished, GrammarSpec, SamplingParams, TokenOutput
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano
from orchestrator.model.vision import prepare
from orchestrator.model.vision.encoder import VisionEncoder
from orchestrator.roles.engine_port import DecodeDone, RunDecode
from orchestrator.roles.handoff_port import decode_note
from orchestrator.roles.messages import Image, RequestSpec
from orchestrator.service.process.build import settings_of
from orchestrator.service.spec import Place, encode_params
from orchestrator.text.tokenizer import load_tokenizer
from orchestrator.vision import place

SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
KEY = ("r", 1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    config = v41_nano(vision=True)
    config = with_fields(config, vision=with_fields(config.vision, min_pixels=14 * 14 * 12, max_image_tokens=40))
    return make_model(config, tmp_path_factory.mktemp("seeing"), seed=20)


@pytest.fixture(scope="module")
def groups(seeing, tmp_path_factory):
    made = [group(seeing, tmp_path_factory.mktemp("service"), role=role) for role in ("prefill", "decode")]
    yield made
    for each in made:
        each.close()


def alone(folder, prompt, params, images=()):
    engine = Engine(load_model(folder), load_tokenizer(folder), settings_of(CONFIG.engine))
    engine.add("r", prompt, params, images=images)
    tokens, notes, reason = [], [], ""
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens.append(event.token_id)
                notes += [] if event.logprob is None else [(event.logprob, event.top_logprobs)]
            elif isinstance(event, Finished):
                reason = event.reason
    return tokens, notes, reason


def apart(prefill, decode, spec, **more):
    """Tokens, notes and reason of a request that one group begins and the other continues."""
    specs = {KEY: spec}
    (state,) = prefill.prefill(specs, expecting=decode, **more).values()
    tokens, notes, reason = list(state.manifest.output), list(state.manifest.notes), ""
    decode.load(specs, {KEY: state})
    while not reason:
        decode.step += 1
        decode.do(RunDecode(decode.step, (KEY,)))
        (done,) = decode.wait(DecodeDone)
        for output in done.outputs:
            tokens += output.tokens
            notes += output.notes
            reason = output.reason
    decode.drop(specs)
    empty(prefill, decode)
    return tokens, [decode_note(note) for note in notes], reason


def test_images(seeing, groups):
    model = load_model(seeing)
    rng, mark = np.random.default_rng(1), model.config.image_token_id
    pixels = [np.random.default_rng(n).integers(0, 256, (80, 100, 3), dtype=np.uint8) for n in (1, 1, 2)]
    text = [rng.integers(3, 400, n).tolist() for n in (40, 70, 7)]
    pictures = [prepare(Picture.fromarray(p), model.config.vision) for p in pixels]
    prompt, placed = place([*text[0], mark, *text[1], mark, mark, *text[2]], pictures, mark)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    encoder = VisionEncoder(model.weights)
    embeddings = {p.image.digest.hex(): image_bytes(encoder.encode(p.image)) for p in placed}
    places = tuple(
        Place(p.start, p.image.geometry.tokens, p.image.geometry.width, p.image.geometry.height, p.image.digest)
        for p in placed
    )
    images = tuple(Image(*each) for each in {p.image.digest.hex(): p.image.geometry.patches for p in placed}.items())
    spec = RequestSpec(tuple(prompt), 10, 0, params=encode_params(params, places), images=images)
    assert apart(*groups, spec, embeddings=tuple(embeddings.items())) == alone(seeing, prompt, params, placed)


def test_log_probabilities_and_a_grammar(seeing, groups):
    for params in (
        SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(seed=4, max_tokens=40, logprobs=0, grammar=GrammarSpec("json_schema", SCHEMA)),
    ):
        grammar = "" if params.grammar is None else params.grammar.text
        spec = RequestSpec((5, 6, 7), params.max_tokens, params.seed, grammar=grammar, params=encode_params(params))
        tokens, notes, reason = expected = alone(seeing, [5, 6, 7], params)
        assert len(notes) == len(tokens) and (reason == "stop") == bool(grammar)
        assert apart(*groups, spec) == expected
