"""What the router's decisions cost with many engines, on one core of the machine that makes the report. Measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import Any

from kernel_core.check import require
from orchestrator.balance.admission import FairQueue, Limits, check_load
from orchestrator.balance.decode import DecodeEngine, Incoming, choose_group, need, place
from orchestrator.balance.paths import PathSettings, PrefillLoad, choose_prefill, choose_side
from orchestrator.balance.prefill import PUBLISHED, PrefillBins, Prompt, key_function
from orchestrator.simulate.figures.jobs import Job
from orchestrator.simulate.figures.prefill_rules import Pull

_GROUP, _TENANTS, _BATCHES = 64, 100, 5


def router(engines: int, calls: int, seed: int) -> dict[str, Any]:
    """Microseconds of core time a decision, with half of `engines` in prefill and half in decode, in groups of 64.

    The decisions of a request: admission and its tenant's turn, its way through the queue to an engine that asks, the
    side that reads, the decode group and the rank in it. `request` is their sum, `a_second` what one core decides.
    Passing messages is not in it.
    """
    require(engines >= 2, "engines", engines, "2 or more")
    require(calls >= 1, "calls", calls, "1 or more")
    random = Random(seed)
    half = engines // 2
    parts = {
        "admission": _admission(calls),
        "tenant's turn": _tenants(random),
        "prefill, one queue": _pull(half, None),
        "decode group": _group(half, random),
        "decode rank, two dimensions": _rank(random),
    }
    others = {
        "prefill, bins by missed": _pull(half, "missed"),
        "prefill, least tokens of all (DualPath)": _dual_path(half, random),
        "side that reads": lambda: choose_side(5_000_000, 4_000_000, PathSettings(busy=1, slow=1)),
        "bins sized anew, once in 2 s": _bins(half),
    }
    cost = {name: _time(call, calls) for name, call in {**parts, **others}.items()}
    request = sum(cost[name] for name in parts)
    return {
        "engines": engines,
        "decisions": cost,
        "of_request": list(parts),
        "request": request,
        "a_second": 1e6 / request,
    }


def _time(call: Callable[[], object], calls: int) -> float:
    """Median over batches of the core's microseconds a call, after one call that is not counted."""
    call()
    batch = max(1, calls // _BATCHES)
    found = []
    for _ in range(_BATCHES):
        begin = time.thread_time_ns()
        for _ in range(batch):
            call()
        found.append((time.thread_time_ns() - begin) / 1e3 / batch)
    return median(found)


def _admission(calls: int) -> Callable[[], object]:
    limits = Limits(context=1 << 20, pool=100_000_000)
    return lambda: check_load(100.0, 500.0, 0.005, 0.05, 300, limits)


def _tenants(random: Random) -> Callable[[], object]:
    queue: FairQueue[int] = FairQueue()
    for tenant in range(_TENANTS):
        queue.push(str(tenant), 0)
        queue.charge(str(tenant), missed=random.randrange(100_000))

    def call() -> None:
        head = queue.pop()
        assert head is not None
        queue.charge(head[0], missed=4500, hit=113_000)
        queue.push(head[0], 0)

    return call


def _pull(engines: int, key: str | None) -> Callable[[], object]:
    rule = Pull.by(key, PUBLISHED, engines, 5.0)  # type: ignore[arg-type]
    for number in range(200):
        rule.put(Job.of(number, 118_000, 113_000 - 128 * number, PUBLISHED), 0.001 * number)
    numbers = iter(range(200, 1 << 30))

    def call() -> None:
        number = next(numbers)
        rule.put(Job.of(number, 118_000, 113_000, PUBLISHED), 0.001 * number)
        while rule.pull(number % engines, 0.001 * number, False) is None:  # an engine of another bin asks
            number += 1

    return call


def _dual_path(engines: int, random: Random) -> Callable[[], object]:
    loads = [PrefillLoad(f"{i:04}", random.randrange(300_000), f"n{i // 8}") for i in range(engines)]
    reading = {f"n{i}": random.randrange(100_000_000) for i in range(engines // 8 + 1)}
    settings = PathSettings(busy=300_000, slow=160_000_000)
    return lambda: choose_prefill(loads, reading, settings)


def _engines(count: int, random: Random) -> list[DecodeEngine]:
    return [
        DecodeEngine(f"{i:04}", random.randrange(40, 80), random.randrange(5_000_000, 9_000_000), 100_000_000)
        for i in range(count)
    ]


def _group(engines: int, random: Random) -> Callable[[], object]:
    count = max(1, engines // _GROUP)
    groups: dict[str, Sequence[DecodeEngine]] = {f"g{i}": _engines(min(engines, _GROUP), random) for i in range(count)}
    incoming = Incoming("r", 118_000, need(118_000, 440))
    return lambda: choose_group(groups, incoming)


def _rank(random: Random) -> Callable[[], object]:
    engines = _engines(_GROUP, random)
    incoming = Incoming("r", 118_000, need(118_000, 440))

    def call() -> None:
        ((_, engine),) = place(engines, [incoming])
        engine.requests -= 1
        engine.tokens -= incoming.length
        engine.room += incoming.need

    return call


def _bins(engines: int) -> Callable[[], object]:
    bins = PrefillBins()
    key = key_function("missed", PUBLISHED)
    for i in range(engines):
        bins.add(f"{i:04}")
    arrived = [0.0] * bins.count
    for missed in (1_000, 20_000, 90_000, 400_000):
        arrived[bins.bin_of(key(Prompt(500_000, missed)))] += 100.0
    return lambda: bins.round(arrived, [0.0] * bins.count, 2.0)
