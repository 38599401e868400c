"""Decode placement: both dimensions against the simple rules, on the lengths of the agentic trace."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from orchestrator.balance.decode import PowerOfTwo, RoundRobin, fewest_requests, fewest_tokens, two_dimensional
from orchestrator.balance.decode.placement import Choose
from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.decode_pool import DecodePool
from orchestrator.simulate.figures.sizes import Sizes
from orchestrator.simulate.figures.workload import Arrivals, Pattern, window

RULES: dict[str, Callable[[int], Choose]] = {
    "round robin": lambda seed: RoundRobin(),
    "power of two": lambda seed: PowerOfTwo(Random(seed)),
    "fewest requests": lambda seed: fewest_requests,
    "fewest tokens": lambda seed: fewest_tokens,
    "two dimensions": lambda seed: two_dimensional,
}
COSTS = {"published, index scan by arithmetic": p.DECODE, "cache read whole": p.DECODE_HEAVY}


def decode_only(arrivals: Arrivals, pool: DecodePool) -> dict[str, np.ndarray]:
    """Requests straight into a decode group, until all are done.

    Returns begin, seconds, alike, sequences and uneven (the fullest rank's sequences over the mean) and long (the same
    of tokens) of each step, and `first` and `done` seconds of each request.
    """
    now, come = 0.0, 0
    rows: list[tuple[float, ...]] = []
    first, done = np.full(len(arrivals), np.nan), np.full(len(arrivals), np.nan)
    given = np.zeros(len(arrivals), np.int64)
    while come < len(arrivals) or pool.queue or pool.sequences.any():
        while come < len(arrivals) and arrivals.times[come] <= now:
            pool.put(come, int(arrivals.tokens[come]), int(arrivals.outputs[come]))
            come += 1
        step = pool.begin()
        if step is None:
            now = float(arrivals.times[come])
            continue
        seconds, alike, fresh = step
        s, t = pool.sequences, pool.tokens
        rows.append((now, seconds, alike, float(s.mean()), float(s.max() / s.mean()), float(t.max() / t.mean())))
        now += seconds
        first[fresh] = now
        for number, output in pool.finish():
            done[number], given[number] = now, output
    columns = np.array(rows).reshape(-1, 6).T
    names = ("begin", "seconds", "alike", "sequences", "uneven", "long")
    return {**dict(zip(names, columns, strict=True)), "first": first, "done": done, "given": given}


def decode(pattern: Pattern, ranks: int, sizes: Sizes, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Each rule at each rate under each cost; steps of the second half of the window, in seconds."""
    found: dict[str, Any] = {}
    for cost_name, cost in COSTS.items():
        for rate in sizes.decode_rates:
            arrivals = window(pattern, rate, 2 * sizes.decode_span, seed)
            for name, rule in RULES.items():
                pool = DecodePool(ranks, cost, rule(seed), int(p.POOL.value / p.TOKEN_BYTES.value), 440.0)
                run = decode_only(arrivals, pool)
                inside = (run["begin"] >= sizes.decode_span) & (run["begin"] < 2 * sizes.decode_span)
                row: dict[str, Any] = {
                    "rate": rate,
                    "rule": name,
                    "step": float(run["seconds"][inside].mean()),
                    "step_p99": float(np.quantile(run["seconds"][inside], 0.99)),
                    "alike": float(run["alike"][inside].mean()),
                    "sequences": float(run["sequences"][inside].mean()),
                    "uneven": float(run["uneven"][inside].mean()),
                    "long": float(run["long"][inside].mean()),
                }
                row["user_rate"] = cost.accepted / row["step"]
                found.setdefault(cost_name, []).append(row)
                say(f"decode, {cost_name}, {rate:.0f} a second, {name}: {1e3 * row['step']:.2f} ms")
    return found
