"""Timing of alternatives in one run: they take turns, so that a change of clock or load meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_SAMPLE_S = 200e-6  # a sample is at least this long, well above the clock's own cost


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over `runs` samples."""

    median_us: float
    p10_us: float
    p90_us: float
    runs: int

    @staticmethod
    def of(samples_us: list[float]) -> Timing:
        """Statistics of at least one sample."""
        values = sorted(samples_us)

        def at(quantile: float) -> float:
            position = quantile * (len(values) - 1)
            low = int(position)
            high = min(low + 1, len(values) - 1)
            return values[low] + (values[high] - values[low]) * (position - low)

        return Timing(at(0.5), at(0.1), at(0.9), len(values))


def interleave(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    budget_s: float = 2.0,
    min_runs: int = 5,
    max_runs: int = 200,
    before: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time callables A, B, C, A, B, C, ... until `budget_s` is spent, at least `min_runs` samples each.

    Short calls are repeated inside a sample until it is long enough for the clock. `before` runs ahead of each
    call and is not timed (to evict caches); calls are then never repeated inside a sample.
    """
    repeats = {name: _calibrate(run, single=before is not None) for name, run in alternatives.items()}
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    end = time.perf_counter() + budget_s
    for turn in range(max_runs):
        if turn >= min_runs and time.perf_counter() >= end:
            break
        for name, run in alternatives.items():
            if before is not None:
                before()
            samples[name].append(_sample(run, repeats[name]) * 1e6)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_pair(
    a: Callable[[], object], b: Callable[[], object], *, budget_s: float = 2.0, min_runs: int = 5
) -> tuple[Timing, Timing]:
    """`interleave` for two callables."""
    times = interleave({"a": a, "b": b}, budget_s=budget_s, min_runs=min_runs)
    return times["a"], times["b"]


def evict_caches(megabytes: int = 512) -> Callable[[], None]:
    """A callable that streams through a buffer larger than the last cache level."""
    from kernel_core import _native

    buffer = torch.ones(megabytes << 18)

    def evict() -> None:
        _native.read_all(buffer.data_ptr(), buffer.numel())

    return evict


def _calibrate(run: Callable[[], object], *, single: bool) -> int:
    run()  # first call: page faults, lazy initialisation
    once = _sample(run, 1)
    return 1 if single or once >= _SAMPLE_S else max(1, round(_SAMPLE_S / max(once, 1e-7)))


def _sample(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats
