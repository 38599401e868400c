"""Tables, page and picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.spec.point import POLICIES, SOURCES, Point

PUBLISHED = {16: -1.5, 60: 5.4, 72: 6.7, 96: 11.0}
"""Gain of variable over fixed lengths in per cent, by sequences a rank, as the model's makers give it."""
_COLOURS = dict(zip(POLICIES, ("#718096", "#dd6b20", "#2b6cb0"), strict=True))


def gain(points: Sequence[Point], source: str, sequences: int, over: str = "fixed 5") -> float:
    """Per cent that `variable` makes more tokens a second than another policy."""
    rate = {p.policy: p.tokens_per_second for p in points if (p.source, p.sequences) == (source, sequences)}
    return (rate["variable"] / rate[over] - 1) * 100


def table(points: Sequence[Point], source: str) -> list[str]:
    """Markdown rows of one source."""
    lines = [
        "| sequences | policy | tokens/s | verified | accepted | step | variable against fixed | published |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for p in (p for p in points if p.source == source):
        compared = published = ""
        if p.policy == "variable":
            compared = f"{gain(points, source, p.sequences):+.1f} %"
            if source != "timed" and p.sequences in PUBLISHED:
                published = f"{PUBLISHED[p.sequences]:+.1f} %"
        lines.append(
            f"| {p.sequences} | {p.policy} | {p.tokens_per_second:,.0f} | {p.verified:.2f} | {p.accepted:.2f} | "
            f"{p.step_ms:.2f} ms | {compared} | {published} |"
        )
    return lines


def page(points: Sequence[Point], about: dict[str, Any], picture: str) -> str:
    """The whole page."""
    lines = [
        "# What speculation gains",
        "",
        "`fathom bench spec` makes this page. *Verified* and *accepted* are rows and tokens of a request's step, its",
        "own token among them. *Fixed* verifies every draft, *variable* as many as pay for their time",
        "([speculation.md](speculation.md)).",
        "",
        f"Acceptance: {about['model']}, temperature {about['temperature']}, {about['prompts']} prompts.",
        "",
    ]
    if any(p.source == "timed" for p in points):
        load = f"Load of the machine at the end: {about['load']} programs a core."
        lines += [f"## Timed on {about['device']}", "", load, "", *table(points, "timed"), ""]
        if any(p.device_ms for p in points if p.source == "timed"):
            lines += [*overlap_table(points, "timed"), ""]
    if any(p.source == "imposed" for p in points):
        lines += [
            f"## Run: {about['rank']} on {about['device']}", "",
            "Random weights: every step is planned, computed, verified, drafted for and read as in serving; then as",
            "many drafts stand as in the recording.", "",
            *table(points, "imposed"), "", *shape(points, "imposed"), "", *overlap_table(points, "imposed"), "",
        ]  # fmt: skip
    if any(p.source == "replayed" for p in points):
        measured = bool((about.get("rank_curve") or {}).get("draft_requests"))
        drafting = (
            "drafting as long as was measured."
            if measured
            else f"drafting takes {about['draft_share'] * 100:.0f} % of a step without drafts (three of forty layers)."
        )
        lines += [
            f"## Replayed under the step times of {about['curve']}", "",
            "Confidences and acceptance as recorded, steps as long as that curve says;", drafting, "",
            *table(points, "replayed"), "", *shape(points, "replayed"), "",
        ]  # fmt: skip
    return "\n".join([*lines, f"![throughput and lengths by concurrency]({picture})", ""])


def overlap_table(points: Sequence[Point], source: str) -> list[str]:
    """Markdown rows: what host and device do in an overlapped step."""
    lines = [
        "Overlapped steps. *Held* is the part of the idle time in which the device waits with sampling until the host",
        "has taken the tokens before: all that taking them one step later could gain.", "",
        "| sequences | policy | device | host | device idle | held |", "|---:|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    return lines + [
        f"| {p.sequences} | {p.policy} | {p.device_ms:.2f} ms | {p.host_ms:.2f} ms | {p.bubble * 100:.2f} % | "
        f"{p.held * 100:.2f} % |"
        for p in points
        if p.source == source and p.device_ms > 0
    ]


def shape(points: Sequence[Point], source: str) -> list[str]:
    """How the gains of one source compare with the published ones, and what makes the difference."""
    counts = sorted({p.sequences for p in points if p.source == source})
    found = {(p.policy, p.sequences): p for p in points if p.source == source}
    ours = [gain(points, source, n) for n in counts]
    rising = sum(b > a for a, b in pairwise(ours))
    first, last = found["variable", counts[0]], found["variable", counts[-1]]
    none, fixed = found["none", counts[-1]], found["fixed 5", counts[-1]]
    growth = "growing with concurrency in both" if ours[-1] > ours[0] else "growing with concurrency there only"
    return [
        f"Variable against fixed goes from {ours[0]:+.1f} % at {counts[0]} to {ours[-1]:+.1f} % at {counts[-1]}",
        f"sequences and rises in {rising} of {len(ours) - 1} intervals; published is {PUBLISHED[16]:+.1f} % at 16 to",
        f"{PUBLISHED[96]:+.1f} % at 96: {growth}. Verified lengths",
        f"go from {first.verified:.2f} to {last.verified:.2f} rows (published: 4.4 to 3.2), and variable lengths keep",
        f"{last.accepted / fixed.accepted * 100:.0f} % of the accepted tokens of fixed ones at the most sequences",
        "(published: 3.20 of 3.29, 97 %). Two things make the difference:",
        f"this drafter's drafts stand less often ({fixed.accepted:.2f} tokens a step with all of them verified,",
        "against 3.29), and what rows cost: at the most sequences a step with every draft takes",
        f"{fixed.step_ms / none.step_ms:.1f} times as long as one without. Both decide what a draft is worth.",
    ]


def draw(points: Sequence[Point], path: Path) -> None:
    """Throughput, verified and accepted length against concurrency; a row of pictures a source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sources = [s for s in SOURCES if any(p.source == s for p in points)]
    figure, axes = pyplot.subplots(len(sources), 3, figsize=(12, 3.6 * len(sources)), squeeze=False)
    wanted = (("tokens_per_second", "tokens/s"), ("verified", "verified rows"), ("accepted", "accepted tokens"))
    for row, source in zip(axes, sources, strict=True):
        for axis, (name, label) in zip(row, wanted, strict=True):
            for policy in POLICIES:
                mine = sorted(
                    (p for p in points if (p.source, p.policy) == (source, policy)), key=lambda p: p.sequences
                )
                values = [getattr(p, name) for p in mine]
                axis.plot([p.sequences for p in mine], values, "o-", label=policy, color=_COLOURS[policy])
            axis.set_xlabel(f"sequences ({source})")
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
