"""Prefix reuse in the engine: what a hit changes (the time) and what it does not (tokens, and the bits behind them)."""

from __future__ import annotations

import random

import pytest
import torch

from orchestrator.cache.chain import parents
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.engine.scheduler import Step
from orchestrator.evaluate.feed import Bounds, Feeder, Piece
from swa_replay import plan_decoder_tail, plan_encoder_replay

STRIDE = 256


def engine_of(kit, model, prefix, **options):
    engine = kit.engine_of(model, prefix_cache=prefix, **options)
    if engine.prefix is not None:
        engine.prefix.stride = STRIDE
    return engine


def greedy(tokens=6, **options):
    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 2} | options)


def one(kit, engine, prompt, params=None):
    """(tokens, log-probabilities), and the last event."""
    tokens, logprobs, _, end = kit.run(engine, {"r": (prompt, params or greedy())})["r"]
    return (tokens, logprobs), end


def poison(engine):
    """Rings and tails of nobody hold what must not be read."""
    rings = engine.cache.rings
    rings.fill_(torch.nan if rings.is_floating_point() else 0x7F)
    for tail in engine.cache.tails.values():
        tail.fill_(torch.nan)


LENGTHS = (130, 256, 257, 300, 385, 513, 640, 700)


@pytest.mark.parametrize(("mode", "speculation"), [("alone", "off"), ("alone", 5), ("worker", 5)])
def test_exact_hits_have_the_bits_of_cold_runs(kit, nano, mode, speculation):
    """Repeated prompts, longer ones, and ones that go on from an answer."""
    options = {"mode": mode, "speculation": speculation, "chunk_tokens": 200}
    engine = engine_of(kit, nano, "exact", **options)
    hits = 0
    for length in LENGTHS:
        prompt = kit.prompt_of(length, 1)
        for _ in range(2):
            expected, _ = one(kit, engine_of(kit, nano, "off", **options), prompt, greedy(40))
            found, end = one(kit, engine, prompt, greedy(40))
            assert found == expected, (length, end.cached_tokens)
            hits += end.cached_tokens > 0
            poison(engine)
            prompt = prompt + found[0] + kit.prompt_of(33, length)
    assert hits == len(LENGTHS)
    assert engine.stats.cached_tokens > 2000


@pytest.mark.parametrize("chunk", [130, 512])
def test_canonical_prompts_have_the_same_bits_hot_and_cold(kit, nano, chunk):
    engine = engine_of(kit, nano, "canonical", chunk_tokens=chunk)
    cached = []
    for length in (200, 256, 257, 300, 511, 512, 513, 520, 700, 1025):
        prompt = kit.prompt_of(1025, 2)[:length]
        for _ in range(2):
            expected, cold = one(kit, engine_of(kit, nano, "canonical"), prompt, greedy(20))
            found, end = one(kit, engine, prompt, greedy(20))
            assert found == expected and cold.cached_tokens == 0, (length, end.cached_tokens)
            cached.append(end.cached_tokens)
            poison(engine)
            prompt = prompt + found[0] + kit.prompt_of(5, length)
    assert sum(c > 0 for c in cached) > 14 and max(cached) >= 896


def test_canonical_rebuilds_windows_in_cold_prompts(kit, nano):
    """Behind a boundary it is another function of the prompt than without a cache; before it the same one."""
    for length, same in ((256, True), (700, False)):
        prompt = kit.prompt_of(length, 3)
        plain, _ = one(kit, engine_of(kit, nano, "off"), prompt)
        canonical, _ = one(kit, engine_of(kit, nano, "canonical"), prompt)
        assert (plain == canonical) is same


@pytest.mark.parametrize(("hit", "length"), [(256, 300), (512, 513), (512, 600), (512, 900), (640, 652)])
def test_bounded_hits_follow_the_replay_oracle(kit, nano, hit, length):
    prompt, config = kit.prompt_of(length, 4), nano.config
    engine = engine_of(kit, nano, "bounded", window_bytes=0)
    one(kit, engine, prompt[: hit + 1], greedy(1))
    poison(engine)
    (tokens, logprobs), end = one(kit, engine, prompt)
    assert end.cached_tokens == hit

    feeder = Feeder(nano, 1, length + 8)
    plan = plan_encoder_replay(hit, length, config.sliding_window)
    lower = max(plan.lower, plan_decoder_tail(length, config.sliding_window, config.draft_length).start)
    bounds = Bounds(plan.lower, lower, plan.write_floor)
    feeder.run(Piece(0, prompt, 0, hit, "none"))
    feeder.forget_windows(0)
    row = feeder.run(Piece(0, prompt, plan.start, length, "last", bounds))
    told = list(prompt)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert int(row.argmax()) == token
        assert row.double().log_softmax(-1)[0, token].item() == pytest.approx(logprob, abs=1e-6)
        told.append(token)
        row = feeder.run(Piece(0, told, len(told) - 1, len(told), "last", bounds))


def test_bounded_takes_a_window_that_is_there(kit, nano):
    engine, prompt = engine_of(kit, nano, "bounded"), kit.prompt_of(600, 5)
    cold, _ = one(kit, engine, prompt)
    hot, end = one(kit, engine, prompt)
    assert hot == cold and end.cached_tokens == 512
    assert engine.prefix.windows.counters["hits"] == 1


def test_a_hit_leaves_shared_blocks_as_they_are(kit, nano):
    for mode in ("bounded", "exact", "canonical"):
        engine = engine_of(kit, nano, mode)
        first, second = kit.prompt_of(600, 6), kit.prompt_of(600, 6)[:560] + kit.prompt_of(80, 7)
        one(kit, engine, first)
        shared = engine.scheduler.blocks.match(engine.prefix.chain_of(first).keys)
        before = engine.cache.save_blocks(shared)
        _, end = one(kit, engine, second)
        assert end.cached_tokens >= 256, mode
        after = engine.cache.save_blocks(shared)
        assert all(torch.equal(a, b) for n in before for a, b in zip(before[n], after[n], strict=True))


def test_every_row_wanted_means_no_hit(kit, nano):
    engine, prompt = engine_of(kit, nano, "exact"), kit.prompt_of(600, 8)
    params = greedy(prompt_logprobs=True)
    expected, plain = one(kit, engine_of(kit, nano, "off"), prompt, params)
    one(kit, engine, prompt)
    found, end = one(kit, engine, prompt, params)
    assert found == expected and end.cached_tokens == 0
    assert end.prompt_logprobs == plain.prompt_logprobs and len(end.prompt_logprobs) == 600


def test_requests_of_different_salts_share_nothing(kit, nano):
    engine, prompt = engine_of(kit, nano, "bounded"), kit.prompt_of(600, 24)
    cached = [one(kit, engine, prompt, greedy(cache_salt=salt))[1].cached_tokens for salt in ("a", "b", "", "a", "b")]
    assert cached == [0, 0, 0, 512, 512]


def test_changed_snapshots_cost_time_only(kit, nano):
    engine, prompt = engine_of(kit, nano, "exact"), kit.prompt_of(600, 9)
    cold, _ = one(kit, engine, prompt)
    kept = engine.prefix.windows._kept
    for key, (until, sealed) in list(kept.items()):
        kept[key] = (until, sealed[:-1] + bytes([sealed[-1] ^ 1]))
    hot, end = one(kit, engine, prompt)
    assert hot == cold and end.cached_tokens == 0 and engine.prefix.windows.counters["wrong"] == 1


def test_a_failed_step_and_a_failed_request_leave_nothing(kit, nano, monkeypatch):
    engine, prompt = engine_of(kit, nano, "exact"), kit.prompt_of(600, 10)
    expected, _ = one(kit, engine, prompt)
    blocks, whole = engine.scheduler.blocks, engine.runner.forward

    def broken(*given):
        raise MemoryError("planted")

    monkeypatch.setattr(engine.runner, "forward", broken)
    engine.add("a", prompt, greedy())
    with pytest.raises(MemoryError):
        engine.step()
    engine.abort("a")
    assert blocks.used == 0 and blocks.free == blocks.capacity
    other = kit.prompt_of(300, 11)
    monkeypatch.setattr(engine.runner, "forward", lambda *given: whole(*given) * torch.nan)
    _, end = one(kit, engine, other)
    assert end.reason == "error" and blocks.match(engine.prefix.chain_of(other).keys) == []
    monkeypatch.setattr(engine.runner, "forward", whole)
    found, end = one(kit, engine, prompt)
    assert found == expected and end.cached_tokens == 512


def test_eviction_takes_the_oldest_chain_from_its_end(kit, nano):
    engine = engine_of(kit, nano, "bounded", num_blocks=12)
    first, second, third = (kit.prompt_of(n, 12 + n) for n in (600, 520, 400))
    for prompt in (first, second, third):
        one(kit, engine, prompt, greedy(1))
    there = [len(engine.scheduler.blocks.match(engine.prefix.chain_of(p).keys)) for p in (first, second, third)]
    assert there == [4, 4, 3]  # 11 of 12: 4 + 4 were there, the third wanted 4 and the spare ones went first
    one(kit, engine, first[:300], greedy(1))  # used again: now the second is the oldest
    one(kit, engine, kit.prompt_of(390, 99), greedy(1))
    assert len(engine.scheduler.blocks.match(engine.prefix.chain_of(first).keys)) >= 2
    assert len(engine.scheduler.blocks.match(engine.prefix.chain_of(second).keys)) < 4


@pytest.mark.parametrize("mode", ["bounded", "canonical"])
def test_a_request_parked_in_its_replay_keeps_the_blocks_of_its_hit(kit, nano, mode):
    prompt = kit.prompt_of(600, 20)
    outcomes = []
    for park in (False, True):
        engine = engine_of(kit, nano, mode, chunk_tokens=16, window_bytes=0)
        one(kit, engine, prompt, greedy(1))
        engine.add("r", prompt, greedy())
        engine.step()
        sequence = engine.scheduler.running[0]
        assert 0 < sequence.computed < sequence.hit == 512
        if park:
            step = Step()
            engine.scheduler._park(sequence, step)
            engine._run(step)
            ids = engine.scheduler.blocks.take(engine.scheduler.blocks.free)  # somebody else takes and writes all
            for pool in engine.cache.pools.values():
                pool.main.fill_(0x55)
                pool.index.fill_(0x55)
            engine.scheduler.blocks.give(ids)
        outcomes.append(kit.finish(engine)["r"][:2])
        assert len(engine.scheduler.blocks.match(engine.prefix.chain_of(prompt).keys)) == 4  # named anew
    assert outcomes[0] == outcomes[1] and len(outcomes[0][0]) > 0


def sound(engine):
    """Blocks add up, running requests hold what they list, and no named block stands without its parent."""
    blocks, pool = engine.scheduler.blocks, engine.scheduler.blocks.pool
    counts = pool.counts
    assert sum(counts.values()) == blocks.capacity
    held = {}
    for sequence in engine.scheduler.running:
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        for block in sequence.blocks:
            held[block] = held.get(block, 0) + 1
    assert held == pool._holders
    return pool


@pytest.mark.parametrize(("prefix", "mode", "speculation", "seed"), [
    ("exact", "worker", 5, 1), ("exact", "alone", 3, 2), ("canonical", "alone", 5, 3),
    ("canonical", "worker", "off", 4),
])  # fmt: skip
def test_random_histories(kit, nano, prefix, mode, speculation, seed):
    """Requests with shared beginnings come, go and are aborted in a small pool: tokens are those of a fresh engine."""
    rng = random.Random(seed)
    options = {"mode": mode, "speculation": speculation, "chunk_tokens": 150, "max_num_seqs": 4}
    roots = [kit.prompt_of(420, 50 + i) for i in range(2)]
    prompts, parent_of = {}, {}
    for i in range(24):
        cut = rng.randrange(1, 420)
        name = f"{i}"
        if i % 5 == 4:  # goes on from an earlier prompt
            prompts[name] = (prompts[str(rng.randrange(i))] + kit.prompt_of(rng.randrange(1, 50), i))[:600]
        else:
            prompts[name] = roots[rng.randrange(2)][:cut] + kit.prompt_of(rng.randrange(1, 60), i)
    params = {n: SamplingParams(seed=int(n), max_tokens=rng.randrange(1, 90), ignore_eos=True, logprobs=0)
              for n in prompts}  # fmt: skip
    fresh = engine_of(kit, nano, "canonical" if prefix == "canonical" else "off", **options | {"max_num_seqs": 8})
    if fresh.prefix is not None:
        fresh.scheduler.blocks.match = lambda keys: []  # every prompt is cold
    expected = {n: o[:2] for n, o in kit.run(fresh, {n: (prompts[n], params[n]) for n in prompts}).items()}
    engine = engine_of(kit, nano, prefix, num_blocks=8, **options)
    for name, prompt in prompts.items():
        chain = engine.prefix.chain_of(prompt + expected[name][0])
        parent_of.update(zip(chain.keys, parents(chain.root, chain.keys), strict=True))
    waiting, tokens, logprobs, aborted, ends = list(prompts), {}, {}, set(), {}
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.7:
            name = waiting.pop(0)
            engine.add(name, prompts[name], params[name])
            tokens[name], logprobs[name] = [], []
        open_ = [n for n in tokens if n not in ends]
        if open_ and rng.random() < 0.01:
            aborted.add(rng.choice(open_))
            engine.abort(max(aborted, key=lambda n: n in open_))
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
                logprobs[event.request_id].append(event.logprob)
            elif isinstance(event, Finished):
                ends[event.request_id] = event
        pool = sound(engine)
        keys, root = pool._by_key, engine.prefix.root_of("")
        assert all(parent_of[key] in keys or parent_of[key] == root for key in keys)
    for name, end in ends.items():
        if end.reason == "abort":
            size = len(tokens[name])
            assert (tokens[name], logprobs[name]) == tuple(part[:size] for part in expected[name])
        else:
            assert (tokens[name], logprobs[name]) == expected[name], (name, end.cached_tokens)
    assert len(ends) == len(prompts) and sum(e.cached_tokens > 0 for e in ends.values()) > 5
    assert engine.scheduler.blocks.used == engine.scheduler.slots.used == 0
    assert engine.scheduler.blocks.free == engine.scheduler.blocks.capacity
    if (prefix, mode) == ("exact", "alone"):
        assert engine.stats.preemptions > 0
