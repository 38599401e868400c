"""Fetched blocks come into the pools through gdr_swapin, and only right ones count."""

from __future__ import annotations

import random

import pytest

import gdr_swapin
from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.engine.block_loads import BlockLoads, swapin_layout
from orchestrator.engine.prefix_tier import PrefixTier
from orchestrator.engine.request import SamplingParams
from orchestrator.model.cache import CachePools
from orchestrator.model.presets import v41_mini, v41_nano


def test_the_loader_and_the_store_mean_the_same_bytes():
    for config in (v41_nano(), v41_mini()):
        layout, swapin = BlockLayout.of(config), swapin_layout(CachePools(config, 2, 2))
        assert swapin.block_bytes == layout.block_bytes and swapin.numbers == tuple(config.kv_source_layer_ids)
        assert list(swapin.offsets) == [s.offset for s in layout.sections if s.kind == "index"]
    with pytest.raises(ValueError, match="cache: got float32 rows"):
        swapin_layout(CachePools(v41_nano(), 2, 2, quantised=False))


@pytest.fixture
def loaded(tmp_path):
    """An arena with six blocks, and pools to load them into."""
    config, rng = v41_nano(), random.Random(1)
    layout = BlockLayout.of(config)
    arena = HostArena.create(tmp_path / "arena", layout.tag, 8, layout.block_bytes)
    keys = [bytes([n]) * 32 for n in range(6)]
    payloads = [rng.randbytes(layout.block_bytes) for _ in keys]
    for slot, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
        arena.write(slot, key, bytes(32), slot, 5, payload)
    cache = CachePools(config, 12, 2)
    return layout, arena, cache, keys, payloads


def test_slots_land_in_their_blocks(loaded):
    layout, arena, cache, keys, payloads = loaded
    loads = BlockLoads(arena, cache)
    order, blocks = [4, 0, 5, 2], [7, 3, 11, 1]
    assert loads.method == "threads"
    assert loads.load([(slot, 5) for slot in order], [keys[slot] for slot in order], blocks) == 4
    assert layout.gather(cache, blocks) == [payloads[slot] for slot in order]
    assert not any(any(rest) for rest in layout.gather(cache, [2, 4, 5, 6, 8, 9, 10]))
    assert loads.load([], [], []) == 0
    loads.close()


@pytest.mark.parametrize("damage", ["byte", "key", "generation", "erased"])
def test_wrong_bytes_do_not_count(loaded, damage):
    _, arena, cache, keys, _ = loaded
    loads = BlockLoads(arena, cache)
    slots, names = [(n, 5) for n in range(6)], list(keys)
    if damage == "byte":
        arena.payload(3)[100] ^= 1
    elif damage == "key":
        names[3] = bytes(32)
    elif damage == "generation":
        slots[3] = (3, 6)
    else:
        arena.erase(3)
    assert loads.load(slots, names, [1, 2, 3, 4, 5, 6]) == 3
    loads.close()


def test_a_failed_transfer_and_damage_cost_the_hit_only(kit, nano, tmp_path, monkeypatch, caplog):
    layout = BlockLayout.of(nano.config)
    store = EmbeddedStore(tmp_path / "store", layout.tag, 1 << 22)

    def engine_of(name):
        engine = kit.engine_of(nano, prefix_cache="canonical")
        engine.prefix.stride = 256
        arena = HostArena.create(tmp_path / name, layout.tag, 16, layout.block_bytes)
        engine.prefix.tier = PrefixTier(CacheClient.inline(store, arena, engine.prefix.scope))
        return engine

    prompt, params = kit.prompt_of(600, 1), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = kit.run(engine_of("a"), {"r": (prompt, params)})["r"][0]
    failing = engine_of("b")
    found, _, _, end = kit.run(failing, {"r": (prompt, params)})["r"]
    assert found == expected and end.cached_tokens == 512 and failing.prefix.tier.loads.method == "threads"
    failing.scheduler.blocks.pool.trim(0)

    def broken(self, slots, blocks, *, after=None):
        raise gdr_swapin.SwapInError(2, "planted")

    monkeypatch.setattr(gdr_swapin.Loader, "start", broken)
    found, _, _, end = kit.run(failing, {"r": (prompt, params)})["r"]
    assert found == expected and end.cached_tokens == 0
    blocks = failing.scheduler.blocks
    assert blocks.used == 0 and sum(blocks.pool.counts.values()) == blocks.capacity
    assert failing.prefix.tier.client.numbers().get("pinned", 0) == 0
    monkeypatch.undo()
    whole = BlockLoads.load

    def damaging(self, slots, keys, blocks):
        self._arena.payload(slots[2][0])[7] ^= 1  # after the fetch, before the copy
        return whole(self, slots, keys, blocks)

    monkeypatch.setattr(BlockLoads, "load", damaging)
    blocks.pool.trim(0)
    found, _, _, end = kit.run(failing, {"r": (prompt, params)})["r"]
    assert found == expected and end.cached_tokens == 256  # two of four blocks were right
    assert blocks.used == 0 and sum(blocks.pool.counts.values()) == blocks.capacity
    monkeypatch.undo()

    def refused(self):
        raise RuntimeError("planted")

    monkeypatch.setattr(BlockLoads, "__init__", lambda self, arena, cache: refused(self))
    other = engine_of("c")
    found, _, _, end = kit.run(other, {"r": (prompt, params)})["r"]
    assert found == expected and end.cached_tokens == 512  # copied without the loader
    assert other.prefix.tier.loads is None and "gdr_swapin cannot load them: planted" in caplog.text
    failing.prefix.tier.close()
