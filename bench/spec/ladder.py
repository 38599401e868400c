"""One engine, more and more requests: every policy at every concurrency, without computing a prompt twice.

Requests are added and never end, so that a concurrency costs the prompts of the requests that are new in it. Policies
take the same requests further in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

from bench.spec.point import POLICIES, Point
from orchestrator.balance.cost_curve import CostCurve
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.cost_profile import record_shapes
from orchestrator.engine.curve_cache import use_curve
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams
from orchestrator.engine.step_clock import StepClock
from orchestrator.evaluate.speculate import Trial
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.model.dense import DenseMode
from orchestrator.model.transformer import Transformer

WARM_UP, ROUNDS = 4, 2
MOST_A_STEP = 4  # tokens of a request, in the mean of a run

_SPARE = 96  # steps of a request while the prompts of the others are computed


def engine_for(
    model: Transformer, prompts: Sequence[list[int]], most: int, tokens: int, *, drafts: bool, dense: DenseMode
) -> Engine:  # fmt: skip
    """An engine for `most` such requests of up to `tokens` output tokens, with overlapped steps."""
    length = max(map(len, prompts)) + tokens
    length += -length % BLOCK_TOKENS
    config = EngineConfig(
        max_num_seqs=most, num_blocks=most * (1 + length // BLOCK_TOKENS), max_model_len=length, overlap=True,
        dense=dense, max_step_tokens=max(4096, 8 * most), chunk_tokens=2048,
        speculation="scheduled" if drafts else "off",
        device="cuda" if model.device.type == "cuda" else "cpu",
    )  # fmt: skip
    return Engine(model, None, config)


def climb(
    model: Transformer,
    prompts: Sequence[list[int]],
    sequences: Sequence[int],
    steps: int,
    temperature: float,
    *,
    trials: Sequence[Trial] | None = None,
    dense: DenseMode = "fixed",
    source: str = "timed",
    note: Callable[[Point], None] = lambda point: None,
) -> tuple[list[Point], CostCurve | None]:
    """Points of every policy at every concurrency (ascending), and the profiled curve.

    Each policy runs `steps` steps a round after some to warm up, of which the middle throughput and the mean lengths
    count. `trials` impose recorded acceptance (`bench.spec.replayed_engine`). Raises ValueError where requests come to
    their end, as they make more than MOST_A_STEP tokens a step.
    """
    from bench.spec.replayed_engine import impose

    most, counts = max(sequences), sorted(sequences)
    points: list[Point] = []
    curve: CostCurve | None = None
    for policies in (("fixed 5", "variable"), ("none",)):
        drafts = policies != ("none",)
        steps_of_all = len(counts) * len(policies) * ROUNDS * (steps + WARM_UP) + _SPARE
        tokens = (MOST_A_STEP if drafts else 1) * steps_of_all
        engine = engine_for(model, prompts, most, tokens, drafts=drafts, dense=dense)
        for count in counts:
            record_shapes(engine, count)
        curve = use_curve(engine, None) or curve
        if drafts and trials is not None:
            impose(engine, trials)
        for count in counts:
            _fill(engine, prompts, count, tokens, temperature)
            for found in _rounds(engine, policies, count, steps, source):
                points.append(found)
                note(found)
        for i in range(most):
            engine.abort(str(i))
        while engine.has_work:  # a step may still be in flight
            engine.step()
    points.sort(key=lambda p: (p.sequences, POLICIES.index(p.policy)))
    return points, curve


def _fill(engine: Engine, prompts: Sequence[list[int]], count: int, tokens: int, temperature: float) -> None:
    running = engine.scheduler.running
    for i in range(len(running), count):
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        engine.add(str(i), list(prompts[i % len(prompts)]), params)
    while len(running) < count or any(s.remaining > 1 or not s.output_len for s in running):
        engine.step()
        _all_there(engine, count)


def _all_there(engine: Engine, count: int) -> None:
    there = len(engine.scheduler.running) + len(engine.scheduler.waiting)
    if there != count:
        raise ValueError(
            f"steps: got too many, allowed are fewer: {count - there} of {count} requests came to their end"
        )


def _rounds(engine: Engine, policies: Sequence[str], count: int, steps: int, source: str) -> list[Point]:
    found: dict[str, list[Point]] = {policy: [] for policy in policies}
    for _ in range(ROUNDS):
        for policy in policies:
            if engine.speculator is not None:
                engine.speculator.fixed = policy != "variable"
            found[policy].append(_run(engine, policy, count, steps, source))
    return [_middle(mine) for mine in found.values()]


def _run(engine: Engine, policy: str, count: int, steps: int, source: str) -> Point:
    assert engine.pipeline is not None
    for _ in range(WARM_UP):
        engine.step()
    engine.pipeline.clock, stats = StepClock(), engine.stats
    before, began = (stats.output_tokens, stats.verifications, stats.drafts, stats.accepted), time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds, clock = time.perf_counter() - began, engine.pipeline.clock
    _all_there(engine, count)
    after = (stats.output_tokens, stats.verifications, stats.drafts, stats.accepted)
    made, checks, drafts, accepted = (b - a for a, b in zip(before, after, strict=True))
    return Point(
        source, policy, count, made / seconds, 1 + drafts / max(checks, 1), 1 + accepted / max(checks, 1),
        seconds / steps * 1e3, clock.device_seconds * 1e3, clock.host_seconds * 1e3, clock.bubble, clock.held,
    )  # fmt: skip


def _middle(points: Sequence[Point]) -> Point:
    names = ("tokens_per_second", "step_ms", "device_ms", "host_ms", "bubble", "held")
    middle = {name: median(getattr(p, name) for p in points) for name in names}
    return replace(
        points[0], verified=fmean(p.verified for p in points), accepted=fmean(p.accepted for p in points), **middle
    )
