"""Whole engine steps of `v41-mini`, fixed-tile products beside library products, and what kernels take of a step.

`faster` in the table is library over fixed: the cost (below 1) or gain (above 1) of bitwise reproducible results.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from kernel_core.bench import Bench, Case, Problem

_CONTEXT = 256  # tokens each decoding request has behind it


@cache
def _model(dense: str) -> Any:
    from orchestrator.commands.paths import find_model
    from orchestrator.model.load import load_model

    return load_model(find_model("v41-mini"), dense=dense)  # type: ignore[arg-type]


def _prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(3, 4000) for _ in range(length)]


def _decoding(batch: int, dense: str) -> Callable[[], object]:
    """A call that runs one decode step of `batch` requests, for as long as anyone asks."""
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.request import SamplingParams

    engine = Engine(_model(dense), None, EngineConfig(max_num_seqs=batch, num_blocks=512))

    def refill() -> None:
        for i in range(batch):
            params = SamplingParams(temperature=1.0, seed=i, max_tokens=2048, ignore_eos=True)
            engine.add(f"{i}-{engine.stats.steps}", _prompt(_CONTEXT, i), params)
        while any(s.remaining > 1 for s in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()

    def step() -> None:
        if not engine.has_work:
            refill()
        engine.step()

    step()
    return step


def _prefilling(tokens: int, dense: str) -> Callable[[], object]:
    """A call that reads one prompt in a single chunk and samples one token."""
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.request import SamplingParams

    config = EngineConfig(max_num_seqs=1, num_blocks=64, max_step_tokens=tokens, chunk_tokens=tokens)
    engine, prompt = Engine(_model(dense), None, config), _prompt(tokens, 0)

    def run() -> None:
        engine.add("r", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        while engine.has_work:
            engine.step()

    return run


def _packages() -> list[ModuleType]:
    import dspark_kernels
    import mega_moe
    import mhc_engram
    import mla_fp4
    import swa_replay

    return [mla_fp4, swa_replay, mega_moe, mhc_engram, dspark_kernels]


@contextmanager
def kernel_clock() -> Iterator[dict[str, float]]:
    """Seconds inside each compiled kernel while the block runs; Python around them is not counted."""
    spent: dict[str, float] = {}
    undo: list[tuple[Any, str, Any]] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return call

    for package in _packages():
        native = __import__(f"{package.__name__}._native", fromlist=["_native"])
        for name in dir(native):
            function = getattr(native, name)
            if callable(function) and not name.startswith("_") and "isa" not in name:
                undo.append((native, name, function))
                setattr(native, name, timed(f"{package.__name__}.{name}", function))
    try:
        yield spent
    finally:
        for module, name, function in undo:
            setattr(module, name, function)


def _share(step: Callable[[], object], steps: int) -> str:
    with kernel_clock() as spent:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        wall = time.perf_counter() - began
    top = sorted(spent.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {seconds / wall:.0%}" for name, seconds in top)
    return f"{sum(spent.values()) / wall:.0%} of a step is spent in kernels ({parts})"


def _weight_bytes(rows: int) -> int:
    """Stored bytes that a step of `rows` tokens has to read once: every dense weight, and the experts it can reach."""
    from dataclasses import fields

    weights = _model("fixed").weights
    config, total = weights.config, 0

    def size(value: Any) -> int:
        if hasattr(value, "nbytes"):
            return value.nbytes
        return 0 if value is None else sum(size(getattr(value, f.name)) for f in fields(value))

    for layer in weights.layers:
        experts = layer.experts
        routed = sum(t.nbytes for t in (experts.w13, experts.s13, experts.w2, experts.s2))
        reached = min(1.0, rows * config.num_experts_per_tok / config.n_routed_experts)
        tables = 0 if layer.engram is None else layer.engram.table.nbytes + layer.engram.table_scale.nbytes
        total += size(layer) - routed - tables + int(routed * reached)
    return total + weights.head.nbytes


def _decode_problem(batch: int) -> Problem:
    fixed = _decoding(batch, "fixed")
    return Problem(
        native=fixed,
        reference=_decoding(batch, "library"),
        bytes=_weight_bytes(batch),
        flops=0,
        note=f"{_share(fixed, 50)}; the reference is the same engine with library products",
    )


def _prefill_problem(tokens: int) -> Problem:
    fixed = _prefilling(tokens, "fixed")
    return Problem(
        native=fixed,
        reference=_prefilling(tokens, "library"),
        bytes=_weight_bytes(tokens),
        flops=0,
        note=f"{_share(fixed, 3)}; the reference is the same engine with library products",
    )


BENCHES = [
    Bench(
        "orchestrator.engine",
        [
            Case("engine_decode_b1", {"batch": 1, "context": _CONTEXT}, lambda: _decode_problem(1)),
            Case("engine_decode_b16", {"batch": 16, "context": _CONTEXT}, lambda: _decode_problem(16)),
            Case("engine_prefill_q512", {"tokens": 512}, lambda: _prefill_problem(512)),
        ],
        sources=("src/orchestrator/model/**/*.py", "src/orchestrator/engine/**/*.py"),
    )
]
