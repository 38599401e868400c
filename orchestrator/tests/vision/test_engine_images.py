"""Images in the engine: against the oracle, and the same however a prompt is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import Oracle

from orchestrator.engine.engine import Engine
from orchestrator.engine.image_spans import PlacedImage, mask, rows
from orchestrator.engine.request import SamplingParams
from orchestrator.model.engram_tables import token_map_of
from orchestrator.model.record import Recorder


@pytest.fixture(scope="module")
def oracle(nano_path, nano):
    return Oracle(nano_path, token_map=token_map_of(nano_path / "tokenizer.json", nano.config.vocab_size).numpy())


def record_of(engine: Engine, prompt, images, params: SamplingParams) -> dict[str, np.ndarray]:
    recorder = Recorder()
    engine.add("r", prompt, params, recorder=recorder, images=images)
    while engine.has_work:
        engine.step()
    return {key: values.numpy() for key, values in recorder.export().items()}


def seen(engine: Engine, prompt, images, length: int) -> dict[str, np.ndarray]:
    """Where images are, bool [length], and the embeddings there, float64 [length, d], as the oracle takes them."""
    inside, vectors = np.zeros(length, bool), np.zeros((length, engine.model.config.hidden_size))
    for placed in images:
        inside[placed.start : placed.end] = True
        vectors[placed.start : placed.end] = engine.images.encoder.encode(placed.image).double().numpy()
    assert all(prompt[p] == engine.model.config.image_token_id for p in np.flatnonzero(inside))
    return {"image_mask": inside, "embeddings": vectors}


LAYOUTS = {
    "between": [20, "image", 30],
    "first": ["image", 25],
    "last": [25, "image"],
    "alone": ["image"],
    "two, side by side": [3, "image", "other", 40, "image", 2],
    "beyond a window": [5, "image", 150, "other", 3],
}


def prompt_and_images(kit, nano, picture, layout: str):
    known = {"image": picture(100, 80, 1), "other": picture(60, 120, 2)}
    parts = [known.get(part, part) for part in LAYOUTS[layout]]
    return kit.prompt_of(nano.config, parts, seed=1)  # no choice so close that float32 and float64 differ


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [512, 7])
def test_unquantised_logits_agree(kit, nano, oracle, picture, layout, chunk):
    """With the router's bias for images, Engram dead on spans, and chunks that cut them."""
    prompt, images = prompt_and_images(kit, nano, picture, layout)
    engine = kit.engine_of(nano, quantised_caches=False, chunk_tokens=chunk)
    record = record_of(engine, prompt, images, kit.greedy(6, prompt_logprobs=True))
    assert len(record["logits"]) == len(prompt) + 5
    trace = oracle.forward(record["tokens"], cache="float", **seen(engine, prompt, images, len(record["tokens"])))
    assert abs(record["logits"] - trace.logits[record["logits/positions"]]).max() <= 1e-4


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("layout", ["two, side by side", "beyond a window"])
def test_every_choice_is_judged(kit, nano, oracle, picture, layout, mode):
    prompt, images = prompt_and_images(kit, nano, picture, layout)
    engine = kit.engine_of(nano, chunk_tokens=33, decoder_prefill=mode)
    record = record_of(engine, prompt, images, kit.greedy(6))
    _, report = oracle.follow(record, **seen(engine, prompt, images, len(record["tokens"])))
    assert report.passed, str(report)


def test_the_judge_sees_whether_spans_are_spans(kit, nano, oracle, picture):
    """With the embeddings, but no word of where images are, router and Engram would differ."""
    prompt, images = prompt_and_images(kit, nano, picture, "between")
    engine = kit.engine_of(nano, quantised_caches=False)
    record = record_of(engine, prompt, images, kit.greedy(2, prompt_logprobs=True))
    given = seen(engine, prompt, images, len(record["tokens"]))
    for wrong in (np.zeros_like(given["image_mask"]), np.roll(given["image_mask"], 1)):
        trace = oracle.forward(record["tokens"], cache="float", image_mask=wrong, embeddings=given["embeddings"])
        assert abs(record["logits"] - trace.logits[record["logits/positions"]]).max() > 0.1


def test_the_bias_of_images_chooses_their_experts(kit, nano, picture):
    """Only inside spans, and only the choice: weights come from the scores."""
    prompt, images = prompt_and_images(kit, nano, picture, "between")
    layer = nano.config.encoder_layers - 1
    moe = nano.moe[layer]
    before = record_of(kit.engine_of(nano), prompt, images, kit.greedy(1))[f"experts/{layer}"]
    kept = moe.bias_vl
    moe.bias_vl = torch.full_like(kept, -100.0)
    moe.bias_vl[[2, 5]] = 100.0
    try:
        after = record_of(kit.engine_of(nano), prompt, images, kit.greedy(1))[f"experts/{layer}"]
    finally:
        moe.bias_vl = kept
    inside = slice(images[0].start, images[0].end)
    assert {tuple(sorted(row)) for row in after[inside].tolist()} == {(2, 5)}
    assert (after[: images[0].start] == before[: images[0].start]).all()


@pytest.mark.parametrize("layout", ["first", "last", "two, side by side"])
def test_chunks_do_not_matter(kit, nano, picture, layout):
    prompt, images = prompt_and_images(kit, nano, picture, layout)
    found = [
        kit.run(
            kit.engine_of(nano, chunk_tokens=chunk, max_step_tokens=max(16, chunk)),
            {"r": (prompt, kit.greedy(), images)},
        )["r"][:2]
        for chunk in (512, 1, 5)
    ]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(("mode", "speculation"), [("alone", 5), ("in order", "off"), ("worker", "scheduled")])
@pytest.mark.parametrize("layout", ["last", "alone", "between"])
def test_speculation_and_overlap_do_not_matter(kit, nano, picture, mode, speculation, layout):
    """Right behind a span the look-back of Engram is dead, and a last token inside one has no id to embed."""
    prompt, images = prompt_and_images(kit, nano, picture, layout)
    text, _ = kit.prompt_of(nano.config, [40], seed=9)
    plain = kit.engine_of(nano, speculation="off")
    params = [kit.greedy(12), kit.greedy(12, temperature=0.8, seed=5)]
    expected = kit.run(plain, {f"i{n}": (prompt, p, images) for n, p in enumerate(params)} | {"t": (text, params[0])})
    engine = kit.engine_of(nano, mode, speculation=speculation)
    found = kit.run(engine, {f"i{n}": (prompt, p, images) for n, p in enumerate(params)} | {"t": (text, params[0])})
    assert {name: each[0] for name, each in found.items()} == {name: each[0] for name, each in expected.items()}


def test_text_beside_images_is_as_without(kit, nano, picture):
    """Bit for bit, log-probabilities too; and a model with an encoder computes text as one without."""
    prompt, images = prompt_and_images(kit, nano, picture, "two, side by side")
    text, _ = kit.prompt_of(nano.config, [60], seed=4)
    alone = kit.run(kit.engine_of(nano), {"t": (text, kit.greedy())})["t"][:2]
    beside = kit.run(kit.engine_of(nano), {"i": (prompt, kit.greedy(), images), "t": (text, kit.greedy())})["t"][:2]
    assert alone == beside
    engine = kit.engine_of(nano)
    engine.images = None
    assert kit.run(engine, {"t": (text, kit.greedy())})["t"][:2] == alone


def test_pictures_and_their_places_matter(kit, nano, picture):
    runs = {}
    for name, parts in {
        "a": [20, picture(seed=1), 10], "b": [20, picture(seed=2), 10], "later": [21, picture(seed=1), 9],
    }.items():  # fmt: skip
        prompt, images = kit.prompt_of(nano.config, parts)
        runs[name] = (prompt, kit.greedy(), images)
    assert runs["a"][0] == runs["b"][0]
    found = kit.run(kit.engine_of(nano), runs)
    assert len({tuple(each[1]) for each in found.values()}) == 3


def test_a_parked_request_comes_back(kit, nano, picture):
    """In the midst of a span, in a pool that is too small for all."""
    requests = {}
    for n in range(3):
        prompt, images = kit.prompt_of(nano.config, [200 + n, picture(seed=n), 30, picture(seed=n + 1)], seed=n)
        requests[f"r{n}"] = (prompt, kit.greedy(15), images)
    free = kit.run(kit.engine_of(nano), requests)
    tight = kit.engine_of(nano, num_blocks=5, chunk_tokens=16, speculation="off")
    found = kit.run(tight, requests)
    assert tight.stats.preemptions > 0
    assert {n: r[0] for n, r in found.items()} == {n: r[0] for n, r in free.items()}


def test_an_image_is_encoded_once(kit, nano, picture):
    engine = kit.engine_of(nano)
    prompt, images = kit.prompt_of(nano.config, [5, picture(seed=1), 3, picture(seed=1), 3])
    first = kit.run(engine, {"a": (prompt, kit.greedy(), images)})["a"]
    assert engine.images.counters.patches == images[0].image.geometry.patches
    again = kit.run(engine, {"a": (prompt, kit.greedy(), images)})["a"]
    counters = engine.images.counters
    assert again[:2] == first[:2] and (counters.images, counters.hits) == (4, 3)
    other = kit.run(engine, {"a": (prompt, kit.greedy(cache_salt="tenant"), images)})["a"]
    assert other[:2] == first[:2] and engine.images.counters.patches == 2 * counters.patches, "tenants share nothing"


def test_aborts_give_embeddings_back(kit, nano, picture):
    engine = kit.engine_of(nano, chunk_tokens=4)
    prompt, images = kit.prompt_of(nano.config, [5, picture(seed=1), 30])
    engine.add("waiting", prompt, kit.greedy(), images=images)
    engine.abort("waiting")
    engine.add("running", prompt, kit.greedy(), images=images)
    for _ in range(3):
        engine.step()
    assert engine.images.counters.held_bytes > 0
    engine.abort("running")
    while engine.has_work:
        engine.step()
    assert engine.images.counters.held_bytes == 0 < engine.images.counters.bytes


def test_what_is_refused(kit, nano, picture):
    engine = kit.engine_of(nano)
    image = picture()
    prompt, (placed,) = kit.prompt_of(nano.config, [5, image, 4])
    cases = [
        (prompt, [PlacedImage(4, image)], r"images\[0\]: got token \d+ at position 4, allowed is the image token"),
        (prompt, [PlacedImage(6, image)], r"images\[0\]: got token \d+ at position 15"),
        (prompt[:10], [placed], r"images\[0\]: got tokens up to 15, allowed is the prompt's 10"),
        (prompt, [placed, placed], r"images\[1\]: got start 5, allowed is 15 or more"),
        (prompt, [PlacedImage(-1, image)], r"images\[0\]: got start -1"),
    ]  # fmt: skip
    for tokens, images, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.add("r", tokens, kit.greedy(), images=images)
    with pytest.raises(ValueError, match=r"params|request_id|prompt"):
        engine.add("r", [], kit.greedy(), images=[placed])
    assert not engine.has_work and engine.images.counters.images == 0
    engine.images = None
    with pytest.raises(ValueError, match="images: got 1, allowed is none, since the model has no image encoder"):
        engine.add("r", prompt, kit.greedy(), images=[placed])


def test_the_image_id_without_an_image_is_a_token_like_any_other(kit, nano):
    """Spans say what an image is, not ids."""
    prompt = [5, 6, nano.config.image_token_id, 7]
    assert len(kit.run(kit.engine_of(nano), {"r": (prompt, kit.greedy())})["r"][0]) == 10


def test_masks_and_rows_of_parts(kit, nano, picture):
    engine = kit.engine_of(nano)
    prompt, images = kit.prompt_of(nano.config, [3, picture(seed=1), 2, picture(60, 120, 2), 4])
    spans = engine.encode(images, kit.greedy())
    inside = [token == nano.config.image_token_id for token in prompt]
    every = torch.cat([span.rows for span in spans])
    for start in range(0, len(prompt), 3):
        for end in range(start, len(prompt) + 1):
            part = inside[start:end]
            assert mask(spans, start, end) == (part if any(part) else None)
            got, first = rows(spans, start, end), sum(inside[:start])
            expected = every[first : first + sum(part)]
            assert got is None if not any(part) else torch.equal(got, expected)
    engine.release(spans, kit.greedy())
