"""Operations of the index a second, and the time to match a prompt of 77K tokens."""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from orchestrator.cache.chain import Chain, ChainScope, usable_blocks
from orchestrator.cache.client import CacheClient
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.io.process import IoProcess
from orchestrator.cache.retention import Retention
from orchestrator.cache.store.base import Block, Put
from orchestrator.cache.store.embedded import EmbeddedStore

PROMPT = 77_000
LAYOUT = b"L" * 32
SCOPE = ChainScope(model=b"bench", layout=LAYOUT)


def operations(blocks: int = 500_000, path: int = 600, seed: int = 0) -> dict[str, float]:
    """Operations a second on an index of so many blocks in paths of 600: publish, look up, use (paths), evict."""
    rng = random.Random(seed)
    paths = [[rng.randbytes(32) for _ in range(path)] for _ in range(blocks // path)]
    index, root = BlockIndex(), bytes(32)
    gc.disable()
    try:
        begun = time.perf_counter()
        for number, keys in enumerate(paths):
            parent = root
            for key in keys:
                index.publish(key, parent, 1, float(number), root=root)
                parent = key
        published = time.perf_counter()
        for keys in paths:
            index.match(keys)
        matched = time.perf_counter()
        for number, keys in enumerate(paths):
            index.use(keys, 1e6 + number, Retention.AGENT)
        used = time.perf_counter()
        evicted = 0
        while evicted < len(index) // 2 and (entry := index.oldest()) is not None:
            index.remove(entry.key)
            evicted += 1
        ended = time.perf_counter()
    finally:
        gc.enable()
    count = len(paths) * path
    return {
        "publish": count / (published - begun),
        "look up": count / (matched - published),
        "use of a path": len(paths) / (used - matched),
        "evict": evicted / (ended - used),
    }


def match_ms(repeats: int = 200) -> dict[str, float]:
    """Median milliseconds to find the hit length of a prompt of which all is there, by how far the question goes."""
    tokens = np.random.default_rng(0).integers(0, 129_280, PROMPT, dtype=np.uint32)
    listed = tokens.tolist()
    chain = Chain(SCOPE.root())
    chain.extend(tokens)
    blocks = [
        Block(key, chain.keys[number - 1] if number else chain.root, number, bytes(64))
        for number, key in enumerate(chain.keys)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = EmbeddedStore(folder / "store", LAYOUT, 1 << 24)
        if set(store.write(blocks, time.time())) != {Put.STORED}:
            raise RuntimeError("the prompt's blocks could not be stored")
        times = {
            "hashing": _median(lambda: Chain(SCOPE.root()).extend(tokens), repeats),
            "hashing, tokens in a list": _median(lambda: Chain(SCOPE.root()).extend(listed), repeats),
            "in this process": _median(lambda: _match_here(store, listed), repeats),
        }
        store.close()
        spec = {"kind": "embedded", "folder": str(folder / "store"), "capacity": 1 << 24}
        process = IoProcess(folder / "io", spec, LAYOUT, 64, 8)
        process.start()
        try:
            client = CacheClient(process.socket_path, process.arena_path, SCOPE, answer_s=20.0)
            if client.match(listed).blocks != usable_blocks(PROMPT):
                raise RuntimeError("the I/O process does not find the prompt")
            times["asking the I/O process"] = _median(lambda: client.match(listed), repeats)
            client.close()
        finally:
            process.stop()
    return times


def _match_here(store: EmbeddedStore, tokens: list[int]) -> int:
    chain = Chain(SCOPE.root())
    chain.extend(tokens)
    return store.match(chain.keys[: usable_blocks(len(tokens))])


def _median(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3
