"""Studies of the whole service: prefill rules against load, and the service at rising traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from orchestrator.balance.admission import Limits
from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.configs import ALL, BINNED, EVEN, OURS, Config
from orchestrator.simulate.figures.measure import Summary, Targets, balanced_seconds, crossing, summarise
from orchestrator.simulate.figures.service import Cluster
from orchestrator.simulate.figures.sizes import Sizes
from orchestrator.simulate.figures.traces import Session
from orchestrator.simulate.figures.workload import Arrivals, Pattern, mixed, replayed, window

Say = Callable[[str], None]
Make = Callable[[float, float, int], Arrivals]
"""Traffic from a rate, seconds and a seed."""

TARGETS = Targets()
MIX = (0.7, 0.2, 0.1)
RANGED = (OURS.name, EVEN.name, "bins: length")


def agentic_traffic(pattern: Pattern) -> Make:
    """Windows of the agentic trace."""
    return lambda rate, seconds, seed: window(pattern, rate, seconds, seed)


def mixed_traffic(pattern: Pattern, chats: Session, bursts: Session, life: float) -> Make:
    """By requests: 70 % agents, 20 % chats of Mooncake and 10 % of Azure's, their recorded hours sped up."""
    return lambda rate, seconds, seed: mixed(
        [
            window(pattern, MIX[0] * rate, seconds, seed),
            replayed(chats, life, MIX[1] * rate, seconds, seed),
            replayed(bursts, life, MIX[2] * rate, seconds, seed),
        ]
    )


def mixed_rate(pattern: Pattern, chats: Session, bursts: Session, life: float, cluster: Cluster) -> float:
    """`full_rate` of `mixed_traffic`."""
    parts = (pattern, Pattern.of([chats], life), Pattern.of([bursts], life))
    return 1 / sum(share / full_rate(part.requests, cluster) for share, part in zip(MIX, parts, strict=True))


def full_rate(requests: Arrivals, cluster: Cluster) -> float:
    """Requests a second that the prefill GPUs would do balanced and offline, for requests such as these."""
    return float(cluster.gpus / balanced_seconds(requests, cluster).mean())


def run_one(make: Make, rate: float, config: Config, common: Cluster, sizes: Sizes, seed: int) -> Summary:
    """One run of a rule at a rate, measured after the warm-up."""
    end = sizes.warm + sizes.span
    arrivals = make(rate, end, seed)
    _, record = config.run(arrivals, common, seed)
    return summarise(arrivals, record, common, sizes.warm, end, TARGETS)


def climb(make: Make, full: float, config: Config, common: Cluster, sizes: Sizes, seed: int, say: Say) -> list[Summary]:
    """Runs at rising loads up to the second one that misses the targets."""
    found: list[Summary] = []
    for load in sizes.loads:
        found.append(run_one(make, load * full, config, common, sizes, seed))
        say(f"seed {seed}, {config.name}, {found[-1].share:.0%} of balanced: {1e3 * found[-1].mean:.0f} ms")
        if sum(s.worst(TARGETS) > 1 for s in found) >= 2:
            break
    return found


def rules(
    make: Make, full: float, common: Cluster, sizes: Sizes, seed: int, say: Say, configs: Iterable[Config] = ALL
) -> dict[str, Any]:
    """Each rule's runs, and the share of a perfectly balanced offline run up to which it holds the targets.

    The rules in RANGED are run with `sizes.seeds` seeds, for a range. full: requests a second of the balanced run.
    """
    rows = []
    for config in configs:
        runs = climb(make, full, config, common, sizes, seed, say)
        shares = [crossing(runs, TARGETS)]
        upper = replace(sizes, loads=sizes.loads[-6:])
        shares += [
            crossing(climb(make, full, config, common, upper, seed + other, say), TARGETS)
            for other in range(1, sizes.seeds if config.name in RANGED else 1)
        ]
        found = [share for share, _ in shares]
        rows.append(
            {
                "name": config.name,
                "says": config.says,
                "share": sum(found) / len(found),
                "low": min(found),
                "high": max(found),
                "seeds": len(found),
                "mark": shares[0][1],
                "runs": [asdict(s) for s in runs],
            }
        )
    return {"full_rate": full, "targets": asdict(TARGETS), "rules": rows}


def rising(make: Make, common: Cluster, sizes: Sizes, seed: int, say: Say) -> dict[str, Any]:
    """Our rule at rising traffic, with everybody let in, and with the door that refuses what would come too late."""
    limits = Limits(context=1 << 20, pool=int(p.POOL.value / p.TOKEN_BYTES.value), target=TARGETS.p99, patience=1.0)
    kinds = {"all let in": None, "refused when late": limits}
    found: dict[str, Any] = {}
    for name, limit in kinds.items():
        found[name] = []
        for rate in sizes.rates:
            summary = run_one(make, rate, OURS, replace(common, limits=limit), sizes, seed)
            found[name].append(asdict(summary))
            say(f"{name}, {rate:.0f} requests a second: goodput {summary.goodput:.0f}")
    return found


def bins(make: Make, requests: Arrivals, common: Cluster, sizes: Sizes, seed: int, say: Say) -> dict[str, Any]:
    """Bins by length, missed tokens and cost where a new token pays for its past; with published costs see `rules`."""
    cluster = replace(common, prefill=p.PREFILL_WITH_PAIRS)
    few = replace(sizes, seeds=1)
    return rules(make, full_rate(requests, cluster), cluster, few, seed, say, (EVEN, OURS, *BINNED))


def side(make: Make, common: Cluster, sizes: Sizes, seed: int, full: float) -> dict[str, Any]:
    """What reading through the decode side's card is worth, with the published cards and with slower ones."""
    cards: Sequence[tuple[str, float]] = (("400 Gb/s", p.NIC.value), ("200 Gb/s", p.NIC.value / 2))
    found: dict[str, Any] = {}
    for name, rate in cards:
        for ways, gain in (("both sides", common.gain), ("prefill side only", 1 << 60)):
            cluster = replace(common, nic=rate, gain=gain)
            summary = run_one(make, 0.8 * full, OURS, cluster, sizes, seed)
            found[f"{name}, {ways}"] = asdict(summary)
    return found
