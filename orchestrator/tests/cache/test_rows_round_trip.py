"""Rows of real pools out to a store and back into other pools, by the client and an I/O process."""

from pathlib import Path

import torch

from orchestrator.cache.chain import ChainScope
from orchestrator.cache.client import CacheClient
from orchestrator.cache.io.process import IoProcess
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.pool import BlockPool
from orchestrator.cache.store.base import Put
from orchestrator.model.cache import CachePools
from orchestrator.model.presets import v41_nano


def test_what_one_engine_stores_another_reads_byte_for_byte(tmp_path: Path) -> None:
    config = v41_nano(stages=0)
    layout = BlockLayout.of(config)
    scope = ChainScope(model=b"weights", layout=layout.tag, numerics=b"bounded")
    store = {"kind": "embedded", "folder": str(tmp_path / "store"), "capacity": 64 << 20}
    process = IoProcess(tmp_path / "io", store, layout.tag, layout.block_bytes, slots=16)
    process.start()
    try:
        writer, reader = (CacheClient(process.socket_path, process.arena_path, scope, answer_s=20.0) for _ in range(2))
        tokens = torch.randint(0, config.vocab_size, (3 * 128 + 5,), generator=torch.Generator().manual_seed(1))
        source, target = CachePools(config, 8, 2), CachePools(config, 8, 2)
        for pool in source.pools.values():
            for rows in (pool.main, pool.index):
                rows.random_(0, 256, generator=torch.Generator().manual_seed(2))

        pool, cold = BlockPool(8), writer.match(tokens.numpy())
        assert cold.blocks == 0
        ids = pool.take(3)
        handle = writer.insert(cold.chain, 0, layout.gather(source, ids))
        assert handle.wait(20) and handle.puts == [Put.STORED] * 3

        hot = reader.match(tokens.tolist())
        assert hot.hit_tokens == 384
        fetch = reader.fetch(hot, deadline_s=20.0)
        assert fetch.wait(20) and fetch.blocks == 3
        new = BlockPool(8).take(fetch.blocks)
        for number, block in enumerate(new):
            payload = fetch.payload(number)
            assert payload is not None
            layout.scatter(target, [block], [payload])
        assert fetch.intact() == 3
        reader.use(hot, 3)
        fetch.release()
        for layer, rows in source.pools.items():
            assert torch.equal(rows.main[ids], target.pools[layer].main[new])
            assert torch.equal(rows.index[ids], target.pools[layer].index[new])
        writer.close()
        reader.close()
    finally:
        process.stop()
