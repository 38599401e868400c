"""Ledger rows of the engine over several GPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.discover import ROOT
from bench.ep import engine
from bench.ep.rows import digest
from kernel_core.bench import Ceilings, Timing, ledger_row
from kernel_core.bench.cuda import cuda_versions
from orchestrator.model.config import ModelConfig

EACH = {"v41-mini": (8, 64), "v41-flash-rank": (8, 32, 128)}  # requests a GPU
Row = dict[str, object]
Say = Callable[[str], None]


def rows(gpus: int, quick: bool, say: Say) -> Iterator[Row]:
    """ArithmeticError where tokens differ from those of one GPU."""
    for name, each, load, config, model in _models(gpus, quick):
        counts = each[:1] if quick else each
        reference = {n: engine.alone(model(), gpus * n) for n in counts}
        beside = {n: engine.alone(model(), n) for n in counts}  # the load of one of the GPUs, experts of all of them
        _free()
        say(f"{name} on {gpus} GPUs ...")
        for n, served in zip(counts, engine.steps(load, config, gpus, counts), strict=True):
            same = sum(a == b for a, b in zip(served.tokens, reference[n].tokens, strict=True))
            if same != len(served.tokens) and not _near(name):
                raise ArithmeticError(f"{name}: {same} of {len(served.tokens)} requests have the tokens of one GPU")
            yield _row(
                f"ep{gpus}_step_{name}_r{n}", {"model": name, "requests_a_gpu": n}, served.gaps,
                {"ours, one GPU and its requests": beside[n].gaps, "ours, one GPU and all requests": reference[n].gaps},
                f"{same} of {len(served.tokens)} requests have the tokens of one GPU; {served.rate:.0f} tokens/s, "
                f"one GPU {beside[n].rate:.0f}",
                gpus,
            )  # fmt: skip
    yield _rebalanced(gpus, quick, say)


def _models(gpus: int, quick: bool) -> Iterator[tuple[str, tuple[int, ...], Any, ModelConfig, Callable[[], Any]]]:
    from orchestrator.model.load import load_model
    from orchestrator.model.random_weights import random_model

    folder = str(ROOT / "models" / "v41-mini")
    load, config = engine.mini(folder)
    yield "v41-mini", EACH["v41-mini"], load, config, _kept(lambda: load_model(folder, device="cuda"))
    if quick:
        return
    rank = engine.RandomRank(gpus)
    device = torch.device("cuda", 0)
    yield (
        "v41-flash-rank", EACH["v41-flash-rank"], rank, rank.config(),
        _kept(lambda: random_model(rank.config(), device=device)),
    )  # fmt: skip


def _rebalanced(gpus: int, quick: bool, say: Say) -> Row:
    say("a skewed load, and experts that move ...")
    spec = engine.RandomRank(gpus, skewed=True)
    if quick:
        load, config = engine.mini(str(ROOT / "models" / "v41-mini"))
    else:
        load, config = spec, spec.config()
    r = engine.rebalance(load, config, gpus, 8 if quick else 32, 64 << 20)
    times = [Timing(ms * 1e3, ms * 1e3, ms * 1e3, 1) for ms in (r.during_ms, r.before_ms, r.after_ms)]
    lb = f"{max(r.lb):.2f} before, {r.lb[-1]:.2f} after" if r.lb else "not reported"
    return _row(
        f"ep{gpus}_rebalance", {"model": "v41-mini" if quick else "v41-flash-rank, skewed"}, times[0],
        {"ours, before": times[1], "ours, after": times[2]},
        f"between two tokens while experts move; moe_lb {lb}; {r.moved / 1e9:.2f} GB from peers; all had moved "
        f"{r.seconds:.1f} s after the first request",
        gpus,
    )  # fmt: skip


def _row(point: str, shape: dict[str, object], timing: Timing, peers: dict[str, Timing], note: str, gpus: int) -> Row:
    return ledger_row(
        point=point, op="orchestrator.ep_engine", shape={"gpus": gpus, **shape}, backend="cuda", timing=timing,
        bytes=None, flops=None, ceilings=Ceilings(), digest=digest("orchestrator.ep_engine"),
        peers=[{"name": name, "version": "", "median_us": float(f"{t.median_us:.4g}")} for name, t in peers.items()],
        versions={**cuda_versions(), "gpus": gpus}, note=f"cuda; {note}",
    )  # fmt: skip


def _near(name: str) -> bool:
    """Random weights give logits that lie close together: there a token may differ, and the row says how many."""
    return name != "v41-mini"


def _kept(make: Callable[[], Any]) -> Callable[[], Any]:
    found: list[Any] = []

    def get() -> Any:
        if not found:
            found.append(make())
        return found[0]

    return get


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
