"""Times steps of every size that the engine may run, before it serves anybody: the curve that drafts are weighed by."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from kernel_core.check import require
from orchestrator.balance.cost_curve import CostCurve
from orchestrator.engine.sampler import Settings
from orchestrator.engine.step_inputs import Inputs, sizes
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.config import BLOCK_TOKENS

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine

CONTEXT = 1024  # tokens before a profiled step, where the engine's context allows
_REPEATS, _PATIENCE = 3, 0.1  # timed runs of a size, and seconds after which one has to do


@torch.inference_mode()
def profile(engine: Engine, tick: Callable[[int], None] = lambda rows: None) -> CostCurve:
    """Measure an idle engine: each size a few times, the quickest run of which counts.

    Overlapped steps from graphs are measured as such: one size a graph, and a staircase between them. They write rows
    into blocks that nobody holds. Other steps are measured at `sizes` and write none. Raises ValueError while requests
    are there.
    """
    if engine.has_work:
        raise ValueError("engine: got one with requests, allowed is an idle one")
    depth = 0 if engine.speculator is None else engine.speculator.depth
    graphs = None if engine.pipeline is None else engine.pipeline.graphs
    staircase = graphs is not None and not graphs.failed
    rows = list(graphs.rows) if graphs is not None and staircase else sizes(engine.config.max_num_seqs * (1 + depth))
    seconds = []
    for count in rows:
        requests = min(engine.config.max_num_seqs, -(-count // (1 + depth)))
        chunks = _chunks(engine, requests, count)
        seconds.append(_timed(engine, _replayed(engine, chunks, count) if staircase else _computed(engine, chunks)))
        tick(count)
    batches = [] if engine.speculator is None else sizes(engine.config.max_num_seqs)
    times = [_timed(engine, _drafting(engine, count)) for count in batches]
    return CostCurve(tuple(rows), _rising(seconds), staircase, tuple(batches), _rising(times))


@torch.inference_mode()
def record_shapes(engine: Engine, requests: int) -> None:
    """Record the graphs of steps of that many requests and any number of drafts, so that none is recorded later.

    For an idle engine; does nothing where steps do not come from graphs. A recording takes three runs of the step.
    """
    graphs = None if engine.pipeline is None else engine.pipeline.graphs
    if graphs is None:
        return
    depth = 0 if engine.speculator is None else engine.speculator.depth
    require(0 < requests <= graphs.requests[-1], "requests", requests, f"1 to {graphs.requests[-1]}, the engine's most")
    least, most = (next(n for n in graphs.rows if n >= count) for count in (requests, requests * (1 + depth)))
    for rows in graphs.rows:
        if least <= rows <= most:
            count = min(rows, requests * (1 + depth))
            _replayed(engine, _chunks(engine, requests, count), count)()


def _computed(engine: Engine, chunks: list[Chunk]) -> Callable[[], object]:
    batch = StepBatch.build(chunks, engine.model.ratios)
    return lambda: engine.runner.forward(batch)


def _replayed(engine: Engine, chunks: list[Chunk], rows: int) -> Callable[[], object]:
    pipeline = engine.pipeline
    assert pipeline is not None and pipeline.graphs is not None
    graphs, most = pipeline.graphs, max(len(c.blocks) for c in chunks)
    pipeline.table.starts.fill_(_context(engine))
    inputs = Inputs(
        slots=torch.tensor([c.slot for c in chunks], dtype=torch.int32),
        limits=torch.tensor([len(c.tokens) - 1 for c in chunks], dtype=torch.int32),
        budget=torch.tensor([rows - len(chunks)], dtype=torch.int32),
        lower=torch.zeros(len(chunks), dtype=torch.int64),
        blocks=torch.tensor([c.blocks + [0] * (most - len(c.blocks)) for c in chunks], dtype=torch.int32),
    )
    return lambda: graphs.run(inputs, rows - len(chunks))


def _context(engine: Engine) -> int:
    depth = engine.model.config.backtracking
    return max(0, min(CONTEXT, engine.context - 2 * depth, engine.config.num_blocks * BLOCK_TOKENS // 2))


def _chunks(engine: Engine, requests: int, rows: int) -> list[Chunk]:
    """Requests of nearly equal shares of `rows`, at one context length, over whatever blocks there are."""
    context, chunks = _context(engine), []
    for r in range(requests):
        share = rows // requests + (r < rows % requests)
        count = -(-(context + share) // BLOCK_TOKENS)
        blocks = [1 + (r * count + i) % engine.config.num_blocks for i in range(count)]
        chunks.append(Chunk([1] * share, context, 1 + r, blocks, [1] * min(3, context), global_floor=1 << 40,
                            logits="all"))  # fmt: skip
    return chunks


def _drafting(engine: Engine, requests: int) -> Callable[[], object]:
    speculator, there = engine.speculator, engine.sampler.there
    assert speculator is not None
    position, ones = _context(engine), torch.ones(requests)
    slots = there(torch.arange(1, requests + 1, dtype=torch.int32))
    anchors, positions = (there(torch.full((requests,), value, dtype=torch.int64)) for value in (1, position))
    temperature, top_p = there(ones), there(ones)
    graphs = None if engine.pipeline is None else engine.pipeline.draft_graphs
    if graphs is not None and not graphs.failed:
        coupled = there(torch.zeros(requests, dtype=torch.bool))
        settings = Settings(temperature, top_p, None, positions, coupled)
        return lambda: graphs.run(slots.long(), settings)

    def draft() -> object:
        block = speculator.drafter.block(anchors, positions, slots, engine.cache, position)
        return speculator.drafter.propose(block, temperature, top_p, None, positions, length=speculator.depth)

    return draft


def _timed(engine: Engine, run: Callable[[], object]) -> float:
    on_gpu, found = engine.model.device.type == "cuda", list[float]()
    while len(found) <= _REPEATS and (len(found) < 2 or sum(found) < _PATIENCE):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])  # the first run warms up


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """A larger step takes at least as long: what measures otherwise is noise, and shared by its neighbours."""
    groups: list[list[float]] = []
    for value in seconds:
        groups.append([value])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    return tuple(fmean(group) for group in groups for _ in group)
