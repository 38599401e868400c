"""Groups of ranks for tests: inputs, threads that stand for ranks, and the comparison with the reference."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_comm import Communicator, Dispatched, Shape, reference
from ep_comm.rows import decode_rows


@dataclass
class Step:
    """What every rank of a group passes to one dispatch."""

    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]


def random_step(shape: Shape, seed: int, tokens: list[int] | None = None, routing: str = "any") -> Step:
    """routing: "any" with empty slots, "one rank", "hot expert" (each token has 0), "none" (no token has one)."""
    g = torch.Generator().manual_seed(seed)
    counts = tokens or [int(torch.randint(0, shape.max_tokens + 1, (1,), generator=g)) for _ in range(shape.ranks)]
    step = Step([], [], [])
    for count in counts:
        low, high = (0, shape.experts) if routing == "one rank" else (-1, shape.physical_experts)
        ids = torch.randint(low, high, (count, shape.top_k), generator=g, dtype=torch.int32)
        if routing == "hot expert":
            ids[:, -1] = 0
        if routing == "none":
            ids.fill_(-1)
        step.xs.append(torch.randn(count, shape.hidden, generator=g) * 3)
        step.ids.append(ids)
        step.weights.append(torch.rand(count, shape.top_k, generator=g))
    return step


def expert_rows(shape: Shape, rank: int, got: Dispatched, slots: bool = True) -> torch.Tensor:
    """What this rank's "experts" make of its rows: each multiplies by its number; NaN where nobody may read."""
    expert = (got.ids + 1 + rank * shape.experts).float() * got.weights
    here = got.ids >= 0
    rows = decode_rows(got.x, got.scales)
    each = rows[:, None] * expert[..., None]
    if slots:
        return each.masked_fill(~here[..., None], float("nan"))
    return each.masked_fill(~here[..., None], 0.0).sum(1).masked_fill(~here.any(1)[:, None], float("nan"))


def on_threads(ranks: int, work: Callable[[int], object]) -> list[object]:
    """Each rank's result or exception."""
    results: list[object] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    workers = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a rank hangs"
    return results


def results_of(ranks: int, work: Callable[[int], object]) -> list[object]:
    """Each rank's result; an exception of one is raised."""
    results = on_threads(ranks, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal bits, but any NaN for any other."""
    if a is None or b is None:
        return a is b
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.float(), b.float()
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0)) and same_nan(a, b)


def same_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.is_floating_point() or torch.equal(a.isnan(), b.isnan())


def check_dispatched(got: Dispatched, want: Dispatched) -> None:
    for name in ("counts", "sources", "ids", "weights", "scales", "x"):
        assert same(getattr(got, name), getattr(want, name)), name
    assert (got.fixed, got.epoch) == (want.fixed, want.epoch)


def round_trip(
    comm: Communicator, step: Step, *, fixed: bool = False, slots: bool = True
) -> tuple[Dispatched, torch.Tensor]:
    rank = comm.rank
    got = comm.dispatch(step.xs[rank], step.ids[rank], step.weights[rank], fixed=fixed)
    return got, comm.combine(expert_rows(comm.shape, rank, got, slots), got)


def check_round_trip(
    shape: Shape, step: Step, got: list[tuple[Dispatched, torch.Tensor]], *, fixed: bool, slots: bool, epoch: int
) -> None:
    """All ranks' results against the reference."""
    want = reference.dispatch(shape, step.xs, step.ids, step.weights, fixed=fixed, epoch=epoch)
    for (dispatched, _), expected in zip(got, want, strict=True):
        check_dispatched(dispatched, expected)
    ys = [expert_rows(shape, rank, rows, slots) for rank, rows in enumerate(want)]
    outs = reference.combine(shape, ys, want, step.ids)
    for (_, out), expected_out in zip(got, outs, strict=True):
        assert torch.equal(out, expected_out)
        assert not out.isnan().any()
