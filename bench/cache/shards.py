"""The tail of stripe reads under stragglers."""

from __future__ import annotations

import heapq
import math
import random
import tempfile
import time
from pathlib import Path

from orchestrator.cache.chain import Chain
from orchestrator.cache.erasure.read import Ask, Came, Done, Event, Start, StripeRead, Tick
from orchestrator.cache.erasure.store import ErasureStore
from orchestrator.cache.erasure.target_pool import TargetPool
from orchestrator.cache.erasure.targets import DirectoryTarget
from orchestrator.cache.store.base import Block, Put

WAYS = {"10 of 10": (10, None), "11": (11, None), "11, the 12th at p95": (11, 0.95), "12": (12, None),
        "10, two more at p95": (10, 0.95)}  # fmt: skip
"""Shards asked at first, and the quantile of single reads at which the rest is asked."""


def tail(reads: int = 100_000, dead: bool = False, known: bool = True, seed: int = 0) -> dict[str, dict[str, float]]:
    """Quantiles of a stripe's read in units of the median shard, by the production state machine under a virtual clock.

    A shard takes a lognormal time (sigma 0.25), one in a hundred 5 to 30 times that. A dead target holds the first
    shard and never answers; ways that would wait for it for ever are left out.
    """
    rng = random.Random(seed + 1)
    singles = sorted(_shard_time(rng) for _ in range(100_000))
    found = {}
    for name, (ask, quantile) in WAYS.items():
        if dead and not known and ask == 10 and quantile is None:
            continue
        rng = random.Random(seed)
        hedge = math.inf if quantile is None else singles[int(len(singles) * quantile)]
        times, asked = [], 0
        for _ in range(reads):
            taken, count = _read(rng, ask, hedge, dead, known)
            times.append(taken)
            asked += count
        found[name] = {**_quantiles(times), "shards asked": asked / reads}
    return found


def real_tail(reads: int = 600, median_ms: float = 4.0, seed: int = 0) -> dict[str, dict[str, float]]:
    """The same from the store with threads: directories as targets, each read delayed. In units of the median delay."""
    found = {}
    for name, (ask, quantile) in WAYS.items():
        if quantile is None and ask == 11:
            continue  # the store always hedges
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            targets = [_Slow(Path(folder) / f"t{n:02d}", rng, median_ms / 1e3) for n in range(12)]
            pool = TargetPool(targets, ask=ask, threads=16)
            if quantile is None:
                pool.hedge_s = lambda: 3600.0  # type: ignore[method-assign]
            store = ErasureStore(Path(folder) / "index", b"L" * 32, pool, 1 << 30)
            chain = Chain(bytes(32))
            chain.extend(range(128 * 32))
            blocks = [
                Block(k, chain.keys[n - 1] if n else chain.root, n, bytes(1000)) for n, k in enumerate(chain.keys)
            ]
            if set(store.write(blocks, 0.0)) != {Put.STORED}:
                raise RuntimeError("the stripe could not be stored")
            (record,) = store.stripes
            times = []
            for number in range(reads + 100):
                begun = time.perf_counter()
                if store.read_stripe(record.number) is None:
                    raise RuntimeError("a stripe with all shards could not be read")
                if number >= 100:  # the first ones teach the hedge
                    times.append((time.perf_counter() - begun) * 1e3 / median_ms)
            store.close()
        found[name] = _quantiles(times)
    return found


class _Slow(DirectoryTarget):
    def __init__(self, folder: Path, rng: random.Random, median_s: float) -> None:
        super().__init__(folder)
        self._rng, self._median_s = rng, median_s

    def get(self, name: str) -> bytes | None:
        time.sleep(_shard_time(self._rng) * self._median_s)
        return super().get(name)


def _read(rng: random.Random, ask: int, hedge: float, dead: bool, known: bool) -> tuple[float, int]:
    """One read under a virtual clock. Returns its time and the shards asked."""
    core = StripeRead({0} if dead and known else (), hedge, ask)
    heap: list[tuple[float, int]] = []
    now, asked = 0.0, 0
    event: Event = Start()
    while True:
        for action in core.step(event, now):
            if isinstance(action, Done):
                return now, asked
            if isinstance(action, Ask):
                asked += len(action.shards)
                for shard in action.shards:
                    never = dead and shard == 0
                    heapq.heappush(heap, (math.inf if never else now + _shard_time(rng), shard))
        if core.hedge_at is not None and core.hedge_at < heap[0][0]:
            now, event = core.hedge_at, Tick()
        else:
            now, shard = heapq.heappop(heap)
            event = Came(shard)


def _shard_time(rng: random.Random) -> float:
    time_ = rng.lognormvariate(0.0, 0.25)
    return time_ * rng.uniform(5, 30) if rng.random() < 0.01 else time_


def _quantiles(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {name: times[min(len(times) - 1, int(len(times) * q))]
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999))}  # fmt: skip
