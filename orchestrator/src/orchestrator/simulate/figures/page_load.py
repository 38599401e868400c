"""Tables and sentences of the studies of load and placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.simulate.figures.configs import WITHOUT
from orchestrator.simulate.figures.jobs import SPLIT
from orchestrator.simulate.figures.markdown import ms, table
from orchestrator.simulate.figures.study_load import TARGETS

Content = Mapping[str, Any]
CHANGES = tuple(config.name for config in WITHOUT)


def _share(row: Content) -> str:
    mark = f"{row['mark']} " if row["mark"] else ""
    spread = f" ({100 * row['low']:.0f} to {100 * row['high']:.0f})" if row["seeds"] > 1 else ""
    return f"{mark}{100 * row['share']:.0f} %{spread}"


def _near(row: Content, load: float) -> Content | None:
    """The run nearest to a load, if within 5 points."""
    best: Content = min(row["runs"], key=lambda run: abs(run["share"] - load))
    return best if abs(best["share"] - load) < 0.05 else None


def _rules(rows: Sequence[Content]) -> str:
    def cells(row: Content) -> Iterator[str]:
        for load in (0.5, 0.8):
            run = _near(row, load)
            yield from (ms(run["mean"]), ms(run["p99"])) if run else ("-", "-")
        run = _near(row, 0.8)
        yield from (f"{100 * run['launch_share']:.0f} %", f"{100 * run['lockstep']:.0f} %") if run else ("-", "-")

    head = ("rule", "holds up to", "mean at 50 %", "p99", "mean at 80 %", "p99", "launch", "even ranks")
    ordered = sorted(rows, key=lambda row: -row["share"])
    return table(head, ((f"**{r['name']}**: {r['says']}", _share(r), *cells(r)) for r in ordered))


def rules(content: Content, _: Content) -> Iterator[str]:
    """Every rule by the load that it holds, and which part of ours brings how much."""
    rows = {row["name"]: row for row in content["rules"]}
    t, ours, even = content["targets"], rows["ours"], rows["even"]
    yield (
        f"Simulated; costs published, not measured. Targets: time to the first token {ms(t['mean'])} ms in the mean "
        f"and {t['p99']:g} s at the 99th percentile, {ms(t['token'])} ms a token after it, and no queue that grows. "
        f"100 % is {content['full_rate']:.0f} requests a second of this traffic: all prefill GPUs full, equal, in the "
        "longest published steps, offline. *launch*: part of the steps that is launch; *even ranks*: mean over largest "
        "work of an engine's ranks; both at 80 %. Times in ms; in brackets the range over seeds."
    )
    yield _rules(content["rules"])
    verdict = "beats" if ours["low"] > 0.8 else "does not safely beat"
    yield (
        f"Ours holds the targets up to {_share(ours)} of balanced, which {verdict} the published 80 %; with all GPUs "
        f"as one, which no rule can do, it would be {_share(even)}. What each part of it is worth, by leaving it out "
        "or changing it:"
    )
    changed = ((row, 100 * (row["share"] - ours["share"])) for name, row in rows.items() if name in CHANGES)
    yield table(
        ("change", "holds up to", "points against ours"),
        ((f"{row['name']}: {row['says']}", _share(row), f"{points:+.0f}") for row, points in changed),
    )


def bins(content: Content, _: Content) -> Iterator[str]:
    """Bins by length, missed tokens and cost."""
    yield (
        "With the published costs a token costs the same whatever lies before it, so bins by cost are those by missed "
        "tokens, to the last decision. Here each pair of a new token and one before it takes an assumed 0.011 ns more."
    )
    yield _rules(content["rules"])


def mix(content: Content, _: Content) -> Iterator[str]:
    """Agents and chats together."""
    yield (
        "By requests 70 % agents, 20 % chats of Mooncake and 10 % of Azure's (no prefix ids: all missed), their "
        f"recorded hours sped up. 100 % is {content['full_rate']:.0f} requests a second."
    )
    yield _rules(content["rules"])


def rising(content: Content, _: Content) -> Iterator[str]:
    """Where the time goes, and what the door does."""
    for name, runs in content.items():
        yield f"**{name}**"
        head = ("requests/s", "of balanced", "refused", "queue grows", "goodput", "mean", "p50", "p99", "p99.9")
        yield table((*head, *SPLIT, "ms a token", "p99", "user tokens/s"), map(_rising_row, runs))
    yield (
        "*match* to *first decode* are the parts of the mean time to the first token. A first token counts at the end "
        "of the first decode step. *p99.9* is the compute of prompts of hundreds of thousands of missed tokens on one "
        "GPU. Where the queue grows, the figures are those of 40 seconds and would be worse later: long prompts wait, "
        "and goodput counts the others."
    )


def _rising_row(run: Content) -> tuple[str, ...]:
    return (
        f"{run['rate']:.0f}",
        f"{100 * run['share']:.0f} %",
        f"{100 * run['refused']:.1f} %",
        "yes" if run["growth"] > TARGETS.growth else "",
        f"{run['goodput']:.0f}",
        *(ms(run[key]) for key in ("mean", "p50", "p99", "p999")),
        *(ms(run["split"][part]) for part in SPLIT),
        f"{1e3 * run['token']:.2f}",
        f"{1e3 * run['token_p99']:.2f}",
        f"{1 / run['token']:.0f}",
    )


def side(content: Content, _: Content) -> Iterator[str]:
    """The second path for reads."""
    head = ("cards, readers", "read by the decode side", "fetch, ms", "mean to first token, ms", "p99", "busiest card")
    yield "At 80 % of balanced, with cards of 400 Gb/s a host of 8 GPUs, as published, and of half of that:"
    yield table(
        head,
        (
            (name, f"{100 * r['by_decode']:.0f} %", ms(r["split"]["fetch"]), ms(r["mean"]), ms(r["p99"]),
             f"{100 * max(r['nic'].values()):.0f} %")
            for name, r in content.items()
        ),
    )  # fmt: skip


def decode(content: Content, _: Content) -> Iterator[str]:
    """Placement rules under two costs."""
    for name, rows in content.items():
        yield f"**{name}**: mean step in ms (over that of equal ranks), 64 ranks in lockstep."
        found: dict[float, dict[str, Content]] = {}
        for row in rows:
            found.setdefault(row["rate"], {})[row["rule"]] = row
        head = ("requests/s", "sequences a rank", *next(iter(found.values())))
        yield table(head, ((f"{rate:.0f}", *_steps(by_rule)) for rate, by_rule in found.items()))
        lost = [
            f"{best} is quicker at {rate:.0f} a second" for rate, by_rule in found.items() if (best := _better(by_rule))
        ]
        yield f"Two dimensions: {'; '.join(lost) if lost else 'no rule is quicker'}."


def _steps(by_rule: Mapping[str, Content]) -> Iterator[str]:
    yield f"{by_rule['two dimensions']['sequences']:.0f}"
    for row in by_rule.values():
        yield f"{1e3 * row['step']:.2f} (+{100 * (row['step'] / row['alike'] - 1):.1f} %)"


def _better(by_rule: Mapping[str, Content]) -> str:
    """The rule that is quicker than two dimensions by more than a thousandth, if any."""
    best = min(by_rule, key=lambda rule: by_rule[rule]["step"])
    return best if by_rule[best]["step"] < 0.999 * by_rule["two dimensions"]["step"] else ""
