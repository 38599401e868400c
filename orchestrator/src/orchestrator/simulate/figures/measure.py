"""From what happened to what is reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_core.check import require
from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.jobs import SPLIT, At, Record
from orchestrator.simulate.figures.service import Cluster
from orchestrator.simulate.figures.workload import Arrivals

HEAVY = 65_536  # missed tokens: prompts for which waiting is reported on its own


@dataclass(frozen=True)
class Targets:
    """What a run has to hold: seconds to the first token, mean and 99th percentile, and mean seconds a token after it.

    growth: of the work that waits, as a part of what all prefill GPUs do in that time; more is no steady state.
    """

    mean: float = 0.4
    p99: float = 2.0
    token: float = 0.010
    growth: float = 0.03


@dataclass(frozen=True)
class Summary:
    """Of the requests that came within the measured part of a run. Times in seconds.

    Attributes:
        rate: requests a second offered. share: of what the prefill GPUs would do balanced and offline, that was offered
            to them. refused: part of the requests. goodput: requests a second with a first token in `Targets.p99` and
            tokens in `Targets.token` each.
        split: mean seconds of the parts of the time to the first token. heavy: 99th percentile of prompts with much to
            compute.
        step, launch_share, lockstep: mean prefill step; part of it that is launch; mean over maximum of ranks' work.
        decode_step, decode_alike: mean seconds, and were all ranks alike. sequences: mean on a decode rank.
        nic: use of the busiest card, by kind, over the time in which requests came. by_decode: part of the prefixes
            that the decode side read.
    """

    rate: float
    share: float
    hit_rate: float
    refused: float
    goodput: float
    mean: float
    p50: float
    p99: float
    p999: float
    heavy: float
    split: dict[str, float]
    token: float
    token_p99: float
    growth: float
    step: float
    launch_share: float
    lockstep: float
    decode_step: float
    decode_alike: float
    sequences: float
    nic: dict[str, float]
    by_decode: float

    def worst(self, targets: Targets) -> float:
        """The largest of the measures over its target; 1 or less holds them all."""
        return max(
            self.mean / targets.mean,
            self.p99 / targets.p99,
            self.token / targets.token,
            self.growth / targets.growth,
        )


def balanced_seconds(arrivals: Arrivals, cluster: Cluster) -> np.ndarray:
    """float64, prefill seconds on one GPU of each request in a perfectly balanced run offline.

    Ranks are full and equal in every step, and steps as long as the longest published: 65,536 tokens a rank. No rule
    can do with less while steps are shorter than that.
    """
    cost, hits = cluster.prefill, np.where(arrivals.hits > 128, arrivals.hits, 0)
    computed = np.maximum(0, hits - 128)
    missed = arrivals.tokens - computed
    work = cost.token * missed + cost.prefix * computed + cost.pair * missed * (computed + missed / 2) + cost.tail
    return work * (1 + cost.launch / (cost.token * p.LARGEST_STEP))


def summarise(
    arrivals: Arrivals, record: Record, cluster: Cluster, begin: float, end: float, targets: Targets | None = None
) -> Summary:
    """What happened to requests that came from `begin` on and before `end`."""
    require(begin < end, "begin", begin, f"below {end}")
    targets = targets or Targets()
    times = record.times
    came = (arrivals.times >= begin) & (arrivals.times < end)
    require(bool(came.any()), "begin, end", (begin, end), "a part of the run with requests")
    kept = came & ~record.refused
    first = times[kept, At.FIRST] - times[kept, At.ARRIVED]
    outputs = record.outputs[kept]
    token = (times[kept, At.DONE] - times[kept, At.FIRST]) / np.maximum(1, outputs - p.ACCEPTED.value)
    token = np.where(outputs > p.ACCEPTED.value, token, 0.0)
    several = outputs > p.ACCEPTED.value
    balanced = balanced_seconds(arrivals, cluster)
    heavy = first[arrivals.missed[kept] >= HEAVY]
    steps = np.array([s for s in record.steps if begin <= s[0] < end]).reshape(-1, 4)
    turns = np.array([t for t in record.turns if begin <= t[0] < end]).reshape(-1, 4)
    span, rank_seconds = end - begin, float(steps[:, 1] @ steps[:, 3])
    launches = float(steps[:, 3].sum()) * cluster.prefill.launch
    good = (first <= targets.p99) & (token <= targets.token)
    return Summary(
        rate=float(came.sum() / span),
        share=float(balanced[came].sum() / span / cluster.gpus),
        hit_rate=float(arrivals.hits[came].sum() / arrivals.tokens[came].sum()),
        refused=float(record.refused[came].mean()),
        goodput=float(good.sum() / span),
        mean=_mean(first),
        p50=_quantile(first, 0.5),
        p99=_quantile(first, 0.99),
        p999=_quantile(first, 0.999),
        heavy=_quantile(heavy, 0.99),
        split=dict(zip(SPLIT, map(float, np.diff(times[kept, : At.FIRST + 1], axis=1).mean(0)), strict=True)),
        token=_mean(token[several]),
        token_p99=_quantile(token[several], 0.99),
        growth=float(_waiting(balanced, record, end) - _waiting(balanced, record, begin)) / (span * cluster.gpus),
        step=_mean(steps[:, 1]),
        launch_share=launches / rank_seconds if rank_seconds else 0.0,
        lockstep=float(steps[:, 2].sum()) / (rank_seconds - launches) if rank_seconds > launches else 1.0,
        decode_step=_mean(turns[:, 1]),
        decode_alike=_mean(turns[:, 2]),
        sequences=float(turns[:, 3] @ turns[:, 1] / turns[:, 1].sum()) / cluster.decode if len(turns) else 0.0,
        nic={name: busy / end for name, busy in record.link_use.items()},
        by_decode=record.reads_by_decode / max(1, int((~record.refused).sum())),
    )


def _waiting(seconds: np.ndarray, record: Record, now: float) -> float:
    """Seconds of work of prompts that had come by `now` and were not through."""
    arrived, through = record.times[:, At.ARRIVED], record.times[:, At.PREFILLED]
    return float(seconds[(arrived <= now) & (through > now)].sum())


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _quantile(values: np.ndarray, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else 0.0


def crossing(points: list[Summary], targets: Targets) -> tuple[float, str]:
    """The share of balanced up to which the targets hold, between two runs by interpolation.

    Returns:
        the share, and "" for one between two runs, ">" where every run held them, "<" where not even the first did.
    """
    require(len(points) > 0, "points", "none", "1 or more runs")
    before: tuple[float, float] | None = None
    for point in sorted(points, key=lambda s: s.share):
        worst = point.worst(targets)
        if worst > 1:
            if before is None:
                return point.share, "<"
            share, value = before
            return share + (point.share - share) * (1 - value) / (worst - value), ""
        before = (point.share, worst)
    assert before is not None
    return before[0], ">"
