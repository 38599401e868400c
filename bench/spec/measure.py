"""Timed runs: the engine on one set of requests, with each policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

from bench.spec.point import Point
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.cost_profile import profile
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams
from orchestrator.model.transformer import Transformer

ROUNDS = 3
SETTINGS: dict[str, str | int] = {"none": "off", "fixed 5": 5, "variable": "scheduled"}


def measure(
    model: Transformer,
    prompts: Sequence[list[int]],
    sequences: int,
    tokens: int,
    temperature: float,
    tick: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Points of every policy with so many requests at once, all of the same output length.

    Only steps in which all of them decode are timed, so that prompts and the ragged end count for nothing. The drafts
    of requests without a seed are judged by rejection sampling, as in serving. Policies take turns, `ROUNDS` times over
    other prompts; the median throughput counts, and the mean of the lengths.
    """
    engines = {policy: _engine(model, prompts, sequences, tokens, setting) for policy, setting in SETTINGS.items()}
    rounds: dict[str, list[Point]] = {policy: [] for policy in engines}
    for turn in range(ROUNDS):
        mine = [prompts[(turn * sequences + i) % len(prompts)] for i in range(sequences)]
        for policy, engine in engines.items():
            rounds[policy].append(_run(engine, mine, policy, tokens, temperature))
            tick()
    return [_middle(points) for points in rounds.values()]


def _middle(points: Sequence[Point]) -> Point:
    return replace(
        points[0],
        tokens_per_second=median(p.tokens_per_second for p in points),
        step_ms=median(p.step_ms for p in points),
        verified=fmean(p.verified for p in points),
        accepted=fmean(p.accepted for p in points),
    )


def _engine(
    model: Transformer, prompts: Sequence[list[int]], sequences: int, tokens: int, setting: str | int
) -> Engine:  # fmt: skip
    config = EngineConfig(
        max_num_seqs=sequences,
        num_blocks=sequences * (-(-(max(map(len, prompts)) + tokens + 16) // 128) + 1),
        max_step_tokens=max(512, 8 * sequences),
        speculation=setting,
        device="cuda" if model.device.type == "cuda" else "cpu",
    )
    engine = Engine(model, None, config)
    if setting == "scheduled" and engine.speculator is not None:
        engine.speculator.weigh_by(profile(engine))
    return engine


def _run(engine: Engine, prompts: Sequence[list[int]], policy: str, tokens: int, temperature: float) -> Point:
    sequences = len(prompts)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), list(prompt), SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True))
    running = engine.scheduler.running
    while len(running) < sequences or any(s.remaining > 1 or not s.output_len for s in running):
        engine.step()
    stats = engine.stats
    before = (stats.output_tokens, stats.verifications, stats.drafts, stats.accepted, stats.steps)
    began = time.perf_counter()
    while len(running) == sequences:
        engine.step()
    seconds = time.perf_counter() - began
    after = (stats.output_tokens, stats.verifications, stats.drafts, stats.accepted, stats.steps)
    made, checks, drafts, accepted, steps = (b - a for a, b in zip(before, after, strict=True))
    for i in range(sequences):
        engine.abort(str(i))
    while engine.has_work:  # a step may still be in flight
        engine.step()
    return Point(
        "timed", policy, sequences, made / seconds, 1 + drafts / max(checks, 1), 1 + accepted / max(checks, 1),
        seconds / max(steps, 1) * 1e3,
    )  # fmt: skip
