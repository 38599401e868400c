"""Shared prefixes with images: a picture is part of its blocks' names."""

from __future__ import annotations

import pytest
import torch

from orchestrator.cache.chain import ImageRun, block_keys
from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.engine.prefix_tier import PrefixTier
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.model.vision import prepare


@pytest.fixture
def big(nano, kit):
    """Prepared images of 30 tokens."""
    return lambda seed: prepare(kit.noise(220, 150, seed), nano.config.vision)


def shared_engine(kit, nano, mode: str, **options):
    return kit.engine_of(nano, **{"prefix_cache": mode, "chunk_tokens": 48, "num_blocks": 40} | options)


def cold(kit, nano, prompt, images, **options):
    engine = kit.engine_of(nano, chunk_tokens=48, **options)
    return kit.run(engine, {"r": (prompt, kit.greedy(8), images)})["r"]


@pytest.mark.parametrize(
    ("mode", "before"),
    [("bounded", 110), ("canonical", 128), *(("exact", before) for before in (40, 98, 110, 127, 128))],
)
def test_two_pictures_never_share_a_block(kit, nano, big, mode, before):
    """Equal token ids throughout. `before` puts the span across a block's end, at its beginning, and inside."""
    engine = shared_engine(kit, nano, mode)
    prompts = {}
    for seed in (1, 2):
        prompt, images = kit.prompt_of(nano.config, [before, big(seed), 150])
        prompts[seed] = (prompt, kit.greedy(8), images)
    assert prompts[1][0] == prompts[2][0]
    first = kit.run(engine, {"one": prompts[1]})["one"]
    other = kit.run(engine, {"two": prompts[2]})["two"]
    assert other[2].cached_tokens <= before, "a block that another picture touches was taken"
    again = kit.run(engine, {"again": prompts[1]})["again"]
    assert again[2].cached_tokens >= BLOCK_TOKENS
    if mode == "exact":
        assert first[:2] == cold(kit, nano, *prompts[1][::2])[:2] == again[:2]
        assert other[:2] == cold(kit, nano, *prompts[2][::2])[:2]
    assert first[1] != other[1]


def test_the_same_picture_elsewhere_is_another_prefix(kit, nano, big):
    """Of equal ids: two spans of one picture, or one that is moved by a token."""
    engine, image = shared_engine(kit, nano, "exact"), big(1)
    prompt, _ = kit.prompt_of(nano.config, [60, image, 200])
    token = nano.config.image_token_id
    moved = prompt[:59] + [token] * (image.geometry.tokens + 1) + prompt[60 + image.geometry.tokens :]
    kit.run(engine, {"a": (moved, kit.greedy(4), [PlacedImage(59, image)])})
    found = kit.run(engine, {"b": (moved, kit.greedy(4), [PlacedImage(60, image)])})["b"]
    assert found[2].cached_tokens == 0
    assert kit.run(engine, {"c": (moved, kit.greedy(4), [])})["c"][2].cached_tokens == 0, "no picture at all"


@pytest.mark.parametrize("length", [300, 400])
@pytest.mark.parametrize("cut", [270, 275])
def test_hits_inside_and_around_spans(kit, nano, big, length, cut):
    """A prompt that begins as one before, up to a point within or beside a span; exact mode computes as without."""
    start = 240  # the span is 240 to 270; a block ends at 256
    parts = [start, big(3), length - start]
    prompt, images = kit.prompt_of(nano.config, parts, seed=5)
    engine = shared_engine(kit, nano, "exact")
    kit.run(engine, {"a": (prompt, kit.greedy(4), images)})
    longer = prompt + [7, 8, 9] * 40
    found = kit.run(engine, {"b": (longer, kit.greedy(8), images)})["b"]
    assert found[2].cached_tokens > 0
    assert found[:2] == cold(kit, nano, longer, images)[:2]
    short = prompt[:cut]
    assert kit.run(engine, {"c": (short, kit.greedy(8), images)})["c"][:2] == cold(kit, nano, short, images)[:2]


def test_a_replay_within_a_span(kit, nano, big):
    """Windows behind a hit are rebuilt from embeddings, not from ids, and no block that was there is written."""
    prompt, images = kit.prompt_of(nano.config, [232, big(3), big(4), 120], seed=5)
    engine = shared_engine(kit, nano, "bounded", window_bytes=0)
    kit.run(engine, {"a": (prompt, kit.greedy(4), images)})
    blocks = engine.scheduler.blocks.match(_keys(engine, prompt, images))
    before = engine.cache.save_blocks(blocks)
    longer = prompt[:262] + [5] * 66  # the hit ends at 256, inside the first span; the replay begins at 224
    engine.add("b", longer, kit.greedy(8), images=images[:1])
    engine.step()
    sequence = engine.find("b")
    assert sequence.hit == 256 and sequence.encoder_lower == 256 - nano.config.sliding_window
    while engine.has_work:
        engine.step()
    after = engine.cache.save_blocks(blocks[:2])
    for layer, (main, index) in after.items():
        assert torch.equal(main, before[layer][0][:2]) and torch.equal(index, before[layer][1][:2])


def _keys(engine, prompt, images):
    runs = [
        ImageRun(p.start, p.image.geometry.tokens, p.image.digest, p.image.geometry.width, p.image.geometry.height)
        for p in images
    ]
    return block_keys(engine.prefix.root_of(""), prompt, runs)


def test_canonical_mode_does_not_depend_on_hits(kit, nano, big):
    prompt, images = kit.prompt_of(nano.config, [200, big(3), 200], seed=6)
    engine = shared_engine(kit, nano, "canonical")
    engine.prefix.stride = 256
    first = kit.run(engine, {"a": (prompt, kit.greedy(8), images)})["a"]
    second = kit.run(engine, {"a": (prompt, kit.greedy(8), images)})["a"]
    assert first[:2] == second[:2] and second[2].cached_tokens > 0


def test_overlapped_steps_name_blocks_with_their_pictures(kit, nano, big):
    """Blocks that fill in decode belong to a chain with the prompt's picture."""
    engine = kit.engine_of(nano, "worker", prefix_cache="bounded", chunk_tokens=48)
    prompt, images = kit.prompt_of(nano.config, [80, big(1), 10])
    answer = kit.run(engine, {"a": (prompt, kit.greedy(140), images)})["a"][0]
    longer = prompt + answer + [5] * 60
    _, others = kit.prompt_of(nano.config, [80, big(2), 10])
    assert kit.run(engine, {"b": (longer, kit.greedy(4), others)})["b"][2].cached_tokens == 0
    assert kit.run(engine, {"b": (longer, kit.greedy(4), images)})["b"][2].cached_tokens == 256


def test_the_store_knows_pictures_too(kit, nano, big, tmp_path):
    """Through the tiers behind the pool, into another engine."""
    layout = BlockLayout.of(nano.config)
    store = EmbeddedStore(tmp_path / "store", layout.tag, 1 << 22)

    def served(number, prompt, images):
        engine = shared_engine(kit, nano, "canonical")
        engine.prefix.stride = 256
        arena = HostArena.create(tmp_path / f"arena{number}", layout.tag, 16, layout.block_bytes)
        engine.prefix.tier = PrefixTier(CacheClient.inline(store, arena, engine.prefix.scope))
        return kit.run(engine, {"r": (prompt, kit.greedy(8), images)})["r"]

    prompt, images = kit.prompt_of(nano.config, [100, big(3), 500], seed=6)
    same, others = kit.prompt_of(nano.config, [100, big(4), 500], seed=6)
    assert same == prompt
    first, second = served(1, prompt, images), served(2, prompt, images)
    assert first[2].cached_tokens == 0 and second[2].cached_tokens == 512 and second[:2] == first[:2]
    third = served(3, prompt, others)
    assert third[2].cached_tokens == 0 and third[1] != first[1]
