"""The decode engine with experts over GPUs, against one GPU that holds all: tokens, steps, and a rebalance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kernel_core.bench import Timing
from orchestrator.balance.eplb import EplbSettings, initial
from orchestrator.cluster.local_ep import LocalExpertParallel
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.process import FromFolder, Load, Loaded
from orchestrator.cluster.workers import ProcessWorkers
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.model.config import ModelConfig

if TYPE_CHECKING:
    from orchestrator.model.transformer import Transformer

PROMPT, TOKENS = 16, 96
SKEW = 4  # experts that the router of the skewed model favours, all on one rank


@dataclass(frozen=True)
class RandomRank:
    """Random weights in the shape of `v41-flash-rank`, six experts a GPU. `skewed`: some of one GPU are favoured."""

    gpus: int
    skewed: bool = False

    def config(self) -> ModelConfig:
        from orchestrator.model.presets import v41_flash_rank

        return replace(v41_flash_rank(), n_routed_experts=6 * self.gpus)

    def __call__(self, options: EpOptions) -> Loaded:
        from orchestrator.model.expert_parallel import LoadedPacked
        from orchestrator.model.random_weights import random_model

        device = torch.device("cuda", torch.cuda.current_device())
        model = random_model(self.config(), device=device, dense=options.engine.dense)
        if self.skewed:
            assert options.slots is not None
            chosen = favoured(self.config(), options.ranks, options.slots)
            for moe in model.moe:
                moe.bias[chosen] += 2.0
        return Loaded(model, None, LoadedPacked(model.moe))


def favoured(config: ModelConfig, ranks: int, slots: int) -> list[int]:
    """Experts that at first lie on one rank and nowhere else: what they get is uneven until they move."""
    placed = initial(1, config.n_routed_experts, ranks, slots)
    copies = placed.copies()[0]
    alone = [[int(e) for e in row if e >= 0 and copies[e] == 1] for row in placed.experts[0]]
    return max(alone, key=len)[:SKEW]


@dataclass(frozen=True)
class Served:
    """Tokens of each request, microseconds between a request's tokens, tokens a second."""

    tokens: list[list[int]]
    gaps: Timing
    rate: float


def prompts(vocabulary: int, count: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocabulary, (PROMPT,), generator=g).tolist() for _ in range(count)]


def params(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(count)]


def serve(events: Iterator[Any], ids: list[str]) -> Served:
    """Read a batch to its end."""
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    at: dict[str, list[float]] = {name: [] for name in ids}
    began = time.perf_counter()
    for event in events:
        if isinstance(event, TokenOutput) and event.request_id in tokens:
            tokens[event.request_id].append(event.token_id)
            at[event.request_id].append(time.perf_counter())
        elif isinstance(event, Finished) and event.error:
            raise RuntimeError(f"a request ended in an error: {event.error}")
    seconds = time.perf_counter() - began
    if not all(tokens.values()):
        raise RuntimeError(f"{sum(not t for t in tokens.values())} of {len(ids)} requests gave no token")
    gaps = [1e6 * (b - a) for times in at.values() for a, b in pairwise(times[8:])]
    return Served(list(tokens.values()), Timing.of(gaps), sum(map(len, tokens.values())) / seconds)


def alone(model: Transformer, count: int) -> Served:
    """One GPU with all experts; the second of two batches."""
    from orchestrator.engine.engine import Engine

    engine = Engine(model, None, options_of(1, count).engine)

    def events() -> Iterator[Any]:
        while engine.has_work:
            yield from engine.step()
        yield from engine.take_events()

    for turn in range(2):
        ids = [f"{turn}/{i}" for i in range(count)]
        for name, prompt, setting in zip(ids, prompts(model.config.vocab_size, count), params(count), strict=True):
            engine.add(name, prompt, setting)
        served = serve(events(), ids)
    return served


def group_of(load: Load, config: ModelConfig, options: EpOptions) -> LocalExpertParallel:
    options = options.resolved(config)
    return LocalExpertParallel(ProcessWorkers(options.ranks, options, config, load), options, config)


def options_of(gpus: int, requests: int, **more: Any) -> EpOptions:
    engine = EngineConfig(
        device="cuda", dense="fixed", num_blocks=4 * requests + 8, max_num_seqs=max(1, requests), speculation="off",
        max_step_tokens=max(256, requests * PROMPT), prefix_cache="off",
    )  # fmt: skip
    return EpOptions(gpus, timeout=60.0, engine=engine, **more)


def steps(load: Load, config: ModelConfig, ranks: int, counts: Sequence[int]) -> Iterator[Served]:
    """Of so many requests a rank, the second of two batches: graphs are recorded in the first."""
    group = group_of(load, config, options_of(ranks, max(counts)))
    try:
        for each in counts:
            count = ranks * each
            for _ in range(2):
                given = zip(prompts(config.vocab_size, count), params(count), strict=True)
                served = serve(group.events(), [group.submit(p, s) for p, s in given])
            yield served
    finally:
        group.close()


@dataclass(frozen=True)
class Rebalance:
    """lb: each report of `moe_lb` over 128 steps. before, during, after: milliseconds between tokens."""

    lb: tuple[float, ...]
    before_ms: float
    during_ms: float
    after_ms: float
    moved: int
    seconds: float


def rebalance(load: Load, config: ModelConfig, ranks: int, each: int, bytes_per_step: int) -> Rebalance:
    """A skewed load: the same batch before a plan, while experts move, and when all have moved."""
    count = ranks * each
    plans = EplbSettings(redundant=2, window=64, interval=256, least_tokens=0.0)
    group = group_of(load, config, options_of(ranks, each, eplb=plans, bytes_per_step=bytes_per_step))
    found: list[tuple[float, float, float, list[list[int]]]] = []  # began, ended, gap, tokens
    committed = 0.0
    try:
        end = time.monotonic() + 45
        after = 0
        while time.monotonic() < end and after < 4:
            began = time.monotonic()
            given = zip(prompts(config.vocab_size, count), params(count), strict=True)
            served = serve(group.events(), [group.submit(p, s) for p, s in given])
            found.append((began, time.monotonic(), served.gaps.median_us / 1e3, served.tokens))
            if group.balance.plans.get("committed", 0):
                committed = committed or time.monotonic()
                after += 1
    finally:
        group.close()
    if any(tokens != found[0][3] for *_, tokens in found):
        raise ArithmeticError("tokens changed while experts moved")
    left = group.left
    moved = sum(rank.bytes_moved.get("from peers", 0) for rank in left.values())
    gaps = [gap for _, _, gap, _ in found]
    started = len(found) - after if committed else len(found)
    during = max(gaps[1 : started + 1] or gaps[-1:])
    return Rebalance(
        left[0].moe_lb, gaps[0], during, gaps[-1], moved,
        committed - found[0][0] if committed else 0.0,
    )  # fmt: skip


def mini(folder: str) -> tuple[Load, ModelConfig]:
    from orchestrator.model.checkpoint.reader import Checkpoint

    return FromFolder(folder), Checkpoint(folder).config
