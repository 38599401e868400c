"""Blocks kept for prefixes keep to their marks, and none that a step may read is ever given up."""

from __future__ import annotations

import random

import pytest

from orchestrator.cache.chain import parents
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.fence import Fence
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.engine.shared_blocks import SharedBlocks


def test_above_the_high_mark_the_least_recently_used_go_down_to_the_low_one():
    blocks = SharedBlocks(21, "blocks", Fence(), (0.5, 0.25))  # of 20: 10 and 5
    chains = [[f"{c}{n}".encode() for n in range(4)] for c in "abc"]
    for chain in chains[:2]:
        ids = blocks.take(4)
        assert [blocks.publish(block, key) for block, key in zip(ids, chain, strict=True)] == ids
        blocks.give(ids)
    blocks.reclaim()
    assert blocks.cached == 8  # not above the mark
    found = blocks.match(chains[0])
    blocks.hold(found)
    blocks.give(found)  # used again: b is the oldest now
    ids = blocks.take(4)
    for block, key in zip(ids, chains[2], strict=True):
        blocks.publish(block, key)
    blocks.reclaim()
    assert blocks.cached == 8 and blocks.used == 4  # what is held does not count
    blocks.give(ids)
    blocks.reclaim()
    assert [len(blocks.match(chain)) for chain in chains] == [1, 0, 4]
    assert blocks.cached == 5 and blocks.pool.counts == {"free": 15, "live": 0, "fenced": 0, "cached": 5}


def test_blocks_of_steps_under_way_are_not_given_up():
    fence = Fence()
    blocks = SharedBlocks(11, "blocks", fence, (0.0, 0.0))
    ids = blocks.take(4)
    for number, block in enumerate(ids):
        blocks.publish(block, f"{number}".encode())
    fence.launched = 1
    blocks.give(ids)
    blocks.reclaim()
    assert blocks.fenced == 4 and blocks.match([b"0", b"1"]) == ids[:2]
    blocks.hold(ids[:1])  # a request comes for the first while the step runs
    fence.done = 1
    blocks.reclaim()
    assert blocks.pool.counts == {"free": 9, "live": 1, "fenced": 0, "cached": 0} and blocks.match([b"0"]) == ids[:1]
    blocks.give(ids[:1])
    blocks.reclaim()
    assert blocks.free == blocks.capacity == 10 and blocks.match([b"0"]) == []


@pytest.mark.parametrize(("prefix", "mode", "seed"), [
    ("exact", "worker", 1), ("exact", "alone", 2), ("canonical", "worker", 3),
])  # fmt: skip
def test_random_histories_keep_to_the_marks(kit, nano, prefix, mode, seed):
    """Requests come, share, park and are aborted: blocks add up after every step and tokens are those without marks."""
    rng = random.Random(seed)
    roots = [kit.prompt_of(400, 80 + n) for n in range(2)]
    requests = {}
    for number in range(14):
        prompt = roots[rng.randrange(2)][: rng.randrange(100, 400)] + kit.prompt_of(rng.randrange(1, 40), number)
        requests[f"{number}"] = (prompt, SamplingParams(seed=number, max_tokens=rng.randrange(5, 60), ignore_eos=True))
    options = {"prefix_cache": prefix, "mode": mode, "speculation": 3, "chunk_tokens": 150, "max_num_seqs": 3}
    plain = kit.engine_of(nano, **(options | {"prefix_cache": "canonical" if prefix == "canonical" else "off"}))
    if plain.prefix is not None:
        plain.prefix.stride = 256
    expected = {name: outcome[0] for name, outcome in kit.run(plain, requests).items()}
    engine = kit.engine_of(nano, num_blocks=10, prefix_high=0.5, prefix_low=0.2, **options)
    engine.prefix.stride = 256
    blocks, parent_of, root = engine.scheduler.blocks, {}, engine.prefix.root_of("")
    for name, (prompt, _) in requests.items():
        chain = engine.prefix.chain_of(prompt + expected[name])
        parent_of.update(zip(chain.keys, parents(root, chain.keys), strict=True))
    left, tokens, aborted, cached, trimmed = list(requests), {name: [] for name in requests}, set(), 0, 0
    trim = blocks.pool.trim

    def counting(count):
        nonlocal trimmed
        given = trim(count)
        trimmed += given
        return given

    blocks.pool.trim = counting
    while left or engine.has_work:
        if left and rng.random() < 0.3:
            engine.add(left[0], *requests[left.pop(0)])
        if rng.random() < 0.01 and engine.scheduler.running:
            name = engine.scheduler.running[0].request_id
            aborted.add(name)
            engine.abort(name)
        steps = engine.stats.steps
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
            elif isinstance(event, Finished):
                cached += event.cached_tokens > 0
        if engine.stats.steps > steps:
            assert blocks.cached <= 5
        assert sum(blocks.pool.counts.values()) == 10
        held = [block for sequence in engine.scheduler.running for block in sequence.blocks]
        assert set(held) == set(blocks.pool._holders) and len(held) == sum(blocks.pool._holders.values())
        names = blocks.pool._by_key
        assert all(parent_of[key] in names or parent_of[key] == root for key in names)
    for name, found in tokens.items():
        assert found == (expected[name][: len(found)] if name in aborted else expected[name]), name
    assert trimmed > 3 and cached > 1 and blocks.free == blocks.capacity


def test_marks_that_are_none():
    for high, low in ((0.5, 0.6), (1.1, 0.5), (0.5, -0.1)):
        with pytest.raises(ValueError, match=f"prefix_high, prefix_low: got {high}, {low}"):
            EngineConfig(prefix_high=high, prefix_low=low)
        with pytest.raises(ValueError, match=f"marks: got {high}, {low}"):
            SharedBlocks(5, "blocks", Fence(), (high, low))
