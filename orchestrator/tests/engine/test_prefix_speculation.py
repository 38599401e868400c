"""What speculation leaves in pool and store: blocks of accepted tokens with the bytes of plain decoding, no others."""

from __future__ import annotations

import random

import pytest

from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.engine.prefix_tier import PrefixTier
from orchestrator.engine.request import SamplingParams

OUTPUT = 200


@pytest.fixture
def stored(kit, nano, tmp_path):
    """An engine with a store of its own, and what was handed to it: (key, payload) in order."""
    layout = BlockLayout.of(nano.config)
    count = iter(range(100))

    def make(**options):
        folder = tmp_path / f"{next(count)}"
        engine = kit.engine_of(nano, prefix_cache="exact", **options)
        store = EmbeddedStore(folder / "store", layout.tag, 1 << 24)
        arena = HostArena.create(folder / "arena", layout.tag, 64, layout.block_bytes)
        client, given = CacheClient.inline(store, arena, engine.prefix.scope), []
        insert = client.insert

        def noting(chain, first, payloads, *rest, **named):
            given.extend((chain.keys[first + n], bytes(payload)) for n, payload in enumerate(payloads))
            return insert(chain, first, payloads, *rest, **named)

        client.insert = noting
        engine.prefix.tier = PrefixTier(client)
        return engine, given

    return make


def requests_of(kit):
    """Blocks fill at different steps, at a prompt's very end, and in the last step of a request."""
    return {str(n): (kit.prompt_of(length, n), SamplingParams(seed=n, max_tokens=OUTPUT, ignore_eos=True))
            for n, length in enumerate((20, 57, 127, 128, 185))}  # fmt: skip


@pytest.mark.parametrize(("mode", "drafts"), [("alone", 5), ("in order", 5), ("worker", 5), ("worker", 2)])
def test_only_accepted_rows_are_named_and_stored(kit, stored, mode, drafts):
    requests = requests_of(kit)
    plain, expected = stored(speculation="off")
    outcome = kit.run(plain, requests)
    full = {name: prompt + outcome[name][0] for name, (prompt, _) in requests.items()}
    engine, given = stored(speculation=drafts, mode=mode)
    rng = random.Random(f"{mode} {drafts}")
    kit.tutor(engine, {int(n): tokens for n, tokens in full.items()}, lambda seed, position: rng.randrange(drafts + 1))
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    allowed, tokens = set[bytes](), {name: list(prompt) for name, (prompt, _) in requests.items()}
    while engine.has_work:
        for sequence in engine.scheduler.running:
            tokens[sequence.request_id] = list(sequence.tokens)
        engine.step()
        for sequence in engine.scheduler.running:
            tokens[sequence.request_id] = list(sequence.tokens)
        for name, known in full.items():  # no name but those of tokens that were given out and have their rows
            done = tokens[name] if any(s.request_id == name for s in engine.scheduler.running) else known
            allowed.update(engine.prefix.chain_of(done[: len(done) - 1]).keys)
        assert set(engine.scheduler.blocks.pool._by_key) <= allowed
    assert 0 < engine.stats.accepted < engine.stats.drafts
    keys = {key for known in full.values() for key in engine.prefix.chain_of(known[:-1]).keys}
    assert {key for key, _ in given} == keys == set(engine.scheduler.blocks.pool._by_key) and len(keys) == 10
    assert len(given) == len(keys)  # each once
    assert dict(given) == dict(expected)
    tier = engine.prefix.tier
    for known in full.values():
        assert tier.match(known, engine.prefix.root_of("")).blocks == (len(known) - 1) // 128


def test_rows_behind_the_accepted_ones_are_not_stored(kit, stored):
    """All drafts at a boundary are rejected: the block is there only once its last row is that of an accepted token."""
    prompt = kit.prompt_of(120, 40)
    plain, expected = stored(speculation="off")
    params = SamplingParams(seed=40, max_tokens=20, ignore_eos=True)
    answer = kit.run(plain, {"r": (prompt, params)})["r"][0]
    engine, given = stored(speculation=5)
    kit.tutor(engine, {40: prompt + answer}, lambda seed, position: 0)
    engine.add("r", prompt, params)
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            assert len(given) == (1 if sequence.computed >= 128 else 0), sequence.computed
    assert engine.stats.accepted == 0 and engine.stats.drafts > 50 and given == expected and len(given) == 1
