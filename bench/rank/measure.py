"""Steps of a rank with random weights and full caches: decode from a CUDA graph, prefill as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from bench.rank.record import Recording, recording
from kernel_core import formats
from kernel_core.bench.ceilings import Ceilings
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.model.transfer import to_device
from orchestrator.model.transformer import Transformer

Timer = Callable[[Callable[[], object]], float]  # microseconds of a call


@dataclass
class OpTime:
    """All calls of an op with certain shapes in a step; microseconds."""

    op: str
    shapes: str
    calls: int
    us: float
    bound_us: float


@dataclass
class Step:
    """One measured point. `device_us` is the step on the device, `wall_us` as the host waits for it."""

    kind: str
    sequences: int
    tokens: int  # of a sequence
    context: int  # before them
    device_us: float
    wall_us: float
    ops: list[OpTime]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def filled(model: Transformer, sequences: int, tokens: int) -> CachePools:
    """Caches for that many sequences of that many tokens, whose rows are random and valid."""
    blocks = sequences * -(-tokens // BLOCK_TOKENS)
    cache = CachePools(model.config, 1 + blocks, 1 + sequences, device=model.device)
    generator = torch.Generator(model.device).manual_seed(7)

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=generator, device=model.device)

    for pool in cache.pools.values():
        page = formats.quantize_main(rows(pool.rows_per_block, model.config.head_dim))
        pool.main.copy_(page.expand_as(pool.main))
        keys = formats.quantize_index(rows(pool.rows_per_block, model.config.index_head_dim))
        pool.index.copy_(formats.index_page_from_rows(keys).expand_as(pool.index))
    ring = formats.quantize_window(rows(cache.rings.shape[2], model.config.head_dim))
    cache.rings.copy_(ring.expand_as(cache.rings))
    return cache


def chunks(config_vocab: int, sequences: int, tokens: int, context: int) -> list[Chunk]:
    """Requests whose blocks follow each other, `tokens` new ones behind `context` old ones."""
    per = -(-(context + tokens) // BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(11)
    made = []
    for r in range(sequences):
        ids = torch.randint(0, config_vocab, (tokens + 3,), generator=generator).tolist()
        blocks = list(range(1 + r * per, 1 + (r + 1) * per))
        made.append(Chunk(ids[3:], context, 1 + r, blocks, history=ids[:3] if context >= 3 else []))
    return made


@torch.inference_mode()
def measure(
    model: Transformer, sequences: int, tokens: int, context: int, timer: Timer, bounds: Ceilings, *, graph: bool
) -> Step:
    """Time a step: as a CUDA graph where `graph`, else launch by launch; then each op of it alone, caches cold."""
    cache = filled(model, sequences, context + tokens)
    work = chunks(model.config.vocab_size, sequences, tokens, context)
    model.reserve_positions(context + tokens)
    batch = to_device(StepBatch.build(work, model.ratios), model.device)

    def run() -> torch.Tensor:
        return model.forward(batch, cache)

    run()
    replay: Callable[[], object] = _captured(run) if graph else run
    device_us = timer(replay) if graph else _waited(replay, model.device)
    wall_us = _waited(lambda: (to_device(StepBatch.build(work, model.ratios), model.device), replay()), model.device)
    with recording() as record:
        run()
    return Step(
        "decode" if tokens == 1 else "prefill",
        sequences,
        tokens,
        context,
        device_us,
        wall_us,
        _ops(record, timer, bounds),
    )


def _captured(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
    from orchestrator.engine.graphs import CudaGraph

    graph = CudaGraph(torch.cuda.graph_pool_handle())
    graph.capture(run)
    return graph.replay


def _waited(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return sorted(times)[len(times) // 2]


def _ops(record: Recording, timer: Timer, bounds: Ceilings) -> list[OpTime]:
    rate = (bounds.copy_gbps or bounds.read_gbps or 1.0) * 1e3  # bytes a microsecond
    peak = (bounds.bf16_tflops or bounds.f32_tflops or 1.0) * 1e6
    found = []
    for call in record.calls.values():
        bound = max(call.bytes / rate, call.operations / peak)
        found.append(OpTime(call.op, call.shapes, call.count, call.count * timer(call.run), call.count * bound))
    return sorted(found, key=lambda one: -one.us)


def by_op(ops: Sequence[OpTime]) -> list[OpTime]:
    """Summed over shapes, most expensive first."""
    sums: dict[str, OpTime] = {}
    for one in ops:
        total = sums.setdefault(one.op, OpTime(one.op, "", 0, 0.0, 0.0))
        total.calls, total.us, total.bound_us = (
            total.calls + one.calls,
            total.us + one.us,
            total.bound_us + one.bound_us,
        )
    return sorted(sums.values(), key=lambda one: -one.us)
