"""Many streaming requests while processes die at random: every client has to get exactly what it should."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.service import asks
from bench.service.answers import Answer
from bench.service.clients import complaints, run_crowd
from bench.service.faults import Chaos
from bench.service.latency import spread
from bench.service.park import Park


def measure(
    park: Park, some: Sequence[asks.Ask], expected: Mapping[str, Answer], *, at_once: int, mean: float,
    kinds: Sequence[str] = ("kill",), seed: int = 3, leaving: float = 0.0, step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """`mean`: seconds between faults, in the mean. `leaving`: share of the clients that go away at a random event."""
    park.wait_up()
    before = park.memory()
    began, unix = time.monotonic(), time.time()
    with Chaos(park, seed, mean=mean, kinds=kinds) as chaos:
        got = run_crowd(
            park.url, some, at_once=at_once, leave=lambda ask: leaves(ask, seed, leaving),
            done=lambda ask, answer: step(),
        )  # fmt: skip
    seconds = time.monotonic() - began
    park.wait_up(180)
    park.wait_idle(120)
    wrong = complaints(expected, got) | {ask.name: "no answer" for ask in some if ask.name not in got}
    whole = [answer for answer in got.values() if not answer.left and not answer.trouble]
    status = park.status()
    return {
        "shape": park.shape.title,
        "requests": len(some),
        "at_once": at_once,
        "seconds": seconds,
        "faults": dict(Counter(f"{fault.kind} {fault.role}" for fault in chaos.done)),
        "fault_times": [[fault.at - began, f"{fault.kind} {fault.role}"] for fault in chaos.done],
        "fault_trouble": chaos.trouble,
        "left": sum(answer.left for answer in got.values()),
        "refusals": sum(answer.refusals for answer in got.values()),
        "wrong": wrong,
        "tokens": sum(answer.completion for answer in whole),
        "first_s": spread([answer.first for answer in whole if answer.first is not None]),
        "gap_s": spread([answer.longest_gap for answer in whole]),
        "silent": sum(answer.longest_gap > 1.0 for answer in whole),
        "spans": [[round(x, 2) for x in (a.began - began, a.ended - began, a.longest_gap)] for a in got.values()],
        "memory_before": before,
        "memory_after": park.memory(),
        "recoveries": [
            {**{k: r.get(k) for k in ("name", "role", "why")}, "seconds": r["up"] - r["noticed"]}
            for r in status["recoveries"] if r.get("up") and r["noticed"] >= unix
        ],
        "entry": status["entry"],
    }  # fmt: skip


def leaves(ask: asks.Ask, seed: int, share: float) -> int | None:
    """After how many events this client goes away; None: it stays."""
    rng = random.Random(f"{seed}/{ask.name}/leaves")
    return rng.randrange(40) if rng.random() < share else None
