"""The prefill rules that are compared, by name: each makes a cluster and its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from orchestrator.balance.prefill import PrefillCost, Quota
from orchestrator.balance.prefill.bins import Key
from orchestrator.simulate.figures.jobs import Record
from orchestrator.simulate.figures.prefill_rules import (
    PrefillRule,
    Pull,
    Push,
    fewest,
    power_of_two,
    round_robin,
)
from orchestrator.simulate.figures.service import Cluster, serve
from orchestrator.simulate.figures.workload import Arrivals

LONG = Quota(least=0.05, most=0.3)  # the published attention quota
SHORT = Quota(least=0.15, most=0.15)
YIELDS = 5.0


@dataclass(frozen=True)
class Config:
    """A rule with its settings.

    Attributes:
        name, says: short, and what it does. cluster: from the common one. rule: from a cluster and a seed.
    """

    name: str
    says: str
    cluster: Callable[[Cluster], Cluster]
    rule: Callable[[Cluster, int], PrefillRule]

    def run(self, arrivals: Arrivals, common: Cluster, seed: int = 0) -> tuple[Cluster, Record]:
        cluster = self.cluster(common)
        return cluster, serve(arrivals, cluster, self.rule(cluster, seed))


def _long(cluster: Cluster) -> Cluster:
    return replace(cluster, quota=LONG, ahead=LONG.most)


def _short(cluster: Cluster) -> Cluster:
    return replace(cluster, quota=SHORT, ahead=SHORT.most)


def _early(cluster: Cluster) -> Cluster:
    return replace(_short(cluster), late=False)


def _packed(cluster: Cluster) -> Cluster:
    return replace(_short(cluster), long=SHORT.most)


def _sized(ranks: int) -> Callable[[Cluster], Cluster]:
    return lambda cluster: replace(_short(cluster), engines=max(1, cluster.gpus // ranks), ranks=ranks)


def _pull(key: Key | None, yields: float = 0.0) -> Callable[[Cluster, int], PrefillRule]:
    return lambda cluster, seed: Pull.by(key, cluster.prefill, cluster.engines, yields)


def _push(choose: Callable[[int], Callable[[list[int], list[int]], int]]) -> Callable[[Cluster, int], PrefillRule]:
    return lambda cluster, seed: Push(cluster.engines, cluster.ranks, choose(seed))


def _even(cluster: Cluster) -> Cluster:
    """One GPU as fast as all of them: work is spread to the last token, with the same launch for a step."""
    cost = cluster.prefill
    quick = PrefillCost(cost.launch, *(x / cluster.gpus for x in (cost.token, cost.prefix, cost.pair, cost.tail)))
    hosts = max(1, cluster.gpus // 8)
    quota = Quota(least=0.3, most=0.3, tokens=1 << 60)
    whole = replace(cluster, engines=1, ranks=1, prefill=quick, quota=quota, ahead=0.3)
    return replace(whole, nic=hosts * cluster.nic, balanced=True)


SENT = {
    "round robin": _push(lambda seed: round_robin()),
    "power of two": _push(lambda seed: power_of_two(Random(seed))),
    "fewest requests": _push(lambda seed: fewest(0)),
    "fewest tokens": _push(lambda seed: fewest(1)),
}
BINS: dict[str, Key | None] = {"one queue": None, "length": "length", "missed": "missed", "cost": "cost"}

OURS = Config("ours", "one queue, short first, steps of 150 ms at most, bound late", _short, _pull(None, YIELDS))
EVEN = Config("even", "all GPUs as one: a bound, no rule", _even, _pull(None, YIELDS))
PUSHED = tuple(Config(name, f"sent to a rank at once: {name}", _long, rule) for name, rule in SENT.items())
BINNED = tuple(
    Config(
        f"bins: {name}" if key else name,
        f"engines pull, steps up to 300 ms, {'bins by ' + key if key else 'no bins'}",
        _long,
        _pull(key),
    )
    for name, key in BINS.items()
)
WITHOUT = (
    Config("first come first served", "ours without short first", _short, _pull(None)),
    Config("steps to 300 ms", "ours with the published quota", _long, _pull(None, YIELDS)),
    Config("bound when pulled", "ours without late binding", _early, _pull(None, YIELDS)),
    Config("sent at once", "ours without the common queue: fewest tokens", _short, SENT["fewest tokens"]),
    Config("with bins by missed", "ours with bins by missed tokens", _short, _pull("missed", YIELDS)),
    Config(
        "bins by length instead", "steps of 150 ms, bins by length, first come first served", _short, _pull("length")
    ),
    Config("long ones packed", "ours, prompts longer than a step kept to few engines", _packed, _pull(None, YIELDS)),
    Config("engines of 2 GPUs", "ours, the same GPUs in smaller engines", _sized(2), _pull(None, YIELDS)),
    Config("engines of 8 GPUs", "ours, the same GPUs in larger engines", _sized(8), _pull(None, YIELDS)),
)
ALL = (EVEN, OURS, *WITHOUT, *BINNED, *PUSHED)
