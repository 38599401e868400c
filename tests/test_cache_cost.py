"""What a token costs, read off the pools that the engine allocates."""

from __future__ import annotations

from orchestrator.model.cache import CachePools
from orchestrator.model.presets import v41_mini, v41_nano


def test_mini_costs_890_bytes_a_token():
    cache = CachePools(v41_mini(), num_blocks=3, num_slots=2)
    assert cache.global_bytes_per_token == 890
    assert sum(pool.bytes_per_block for pool in cache.pools.values()) == 113_920
    assert cache.rings.shape == (16, 2, 134, 528)


def test_nano_costs_106_bytes_a_token():
    assert CachePools(v41_nano(), num_blocks=3, num_slots=2).global_bytes_per_token == 106


def test_an_engine_of_mini_holds_what_it_says(mini):
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine

    engine = Engine(mini, None, EngineConfig(num_blocks=10, max_num_seqs=2))
    assert engine.cache.global_bytes_per_token == 890
    assert engine.context == 10 * 128
