"""What was measured of the cache, as a page and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import findings

PUBLISHED = 0.9617  # hit rate of the agentic trace with an endless cache and blocks of 64 tokens
_KEYS = ("about", "operations", "match_ms", "code_gbps", "tail", "real_tail")


def load(path: Path) -> dict[str, Any]:
    """Raises ValueError where the file holds something else."""
    return findings.load(path, "the cache", "fathom bench cache", _KEYS)


def tables(found: Mapping[str, Any]) -> list[str]:
    """Markdown of all that was measured."""
    lines: list[str] = []
    if found.get("trace"):
        lines += ["## Hits on recorded traces", "", *_trace(found["trace"]), ""]
    lines += ["## Index", "", "| operation | a second |", "|---|---:|"]
    lines += [f"| {name} | {rate:,.0f} |" for name, rate in found["operations"].items()]
    lines += ["", "| match of a 77,000-token prompt | median |", "|---|---:|"]
    lines += [f"| {name} | {ms:.2f} ms |" for name, ms in found["match_ms"].items()]
    columns = list(next(iter(found["code_gbps"].values())))
    lines += ["", "## Erasure code", "", "| 10 + 2, a stripe of 32 blocks | " + " | ".join(columns) + " |"]
    lines += ["|---|" + "---:|" * len(columns)]
    for name, rates in found["code_gbps"].items():
        lines.append(f"| {name} | " + " | ".join(f"{rates[c]:.2f} GB/s" if c in rates else "-" for c in columns) + " |")
    lines += ["", "## Tail of stripe reads", ""]
    for dead, rows in found["tail"].items():
        lines += _tail(f"virtual clock, {dead}", rows)
    return lines + _tail("threads and directories, delays in `get`, all alive", found["real_tail"])


def page(found: Mapping[str, Any], picture: str | None) -> str:
    """The whole page."""
    about = found["about"]
    head = [
        "# The KV cache, measured",
        "",
        "`fathom bench cache --traces FOLDER --page docs/kv_cache_measured.md` makes this page; what is measured is "
        "described in [kv_cache.md](kv_cache.md).",
        "",
        f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, load {about['load']} when it began; "
        f"{about['date']}",
        "",
    ]
    if picture:
        head += [f"![hit rate against capacity and time to live]({picture})", ""]
    return "\n".join([*head, *tables(found)]) + "\n"


def draw(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Hit rate against capacity, against time to live, and of both classes in one store."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    agentic = [p for p in points if p["trace"] == "agentic"]
    endless = next(p["rate"] for p in agentic if p["capacity_gb"] is None and p["ttl_s"] is None)
    by_size = [(p["capacity_gb"], p["rate"]) for p in agentic if p["capacity_gb"] is not None]
    by_life = [(p["ttl_s"] / 60, p["rate"]) for p in agentic if p["ttl_s"] is not None]
    mixed = [p for p in points if p["trace"] != "agentic" and p["capacity_gb"] is not None]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.8))
    for axis, curve, label in ((left, by_size, "capacity, GB"), (middle, by_life, "time to live, minutes")):
        axis.plot(*zip(*sorted(curve), strict=True), "o-", color="#2b6cb0")
        axis.axhline(endless, color="#718096", linewidth=0.8)
        axis.set_xlabel(label)
    left.set_ylabel("share of prompt tokens that hit")
    left.set_title("agentic sessions")
    middle.set_title("agentic sessions")
    for name, colour in (("agent", "#2b6cb0"), ("chat", "#c05621")):
        right.plot([p["capacity_gb"] for p in mixed], [p[name] for p in mixed], "o-", color=colour, label=name)
    right.set_xlabel("capacity, GB")
    right.set_title("agents and chats in one store")
    if mixed:
        right.legend()
    for axis in (left, middle, right):
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _trace(points: Sequence[Mapping[str, Any]]) -> list[str]:
    endless = next(p for p in points if p["trace"] == "agentic" and p["capacity_gb"] is None and p["ttl_s"] is None)
    lines = [
        f"{endless['requests']:,} agentic requests hit {endless['rate']:.2%} of their tokens without bounds "
        f"({abs(endless['rate'] - PUBLISHED) * 100:.2f} points from the trace's own {PUBLISHED:.2%}, which counts "
        "blocks of 64 tokens).",
        "",
        "| trace | capacity | time to live | hits | agents | chats | blocks written | removed | most held |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for p in points:
        capacity = f"{p['capacity_gb']:g} GB" if p["capacity_gb"] is not None else "-"
        life = f"{p['ttl_s'] / 60:,.0f} min" if p["ttl_s"] is not None else "3 and 7 days"
        agent, chat = (f"{p[c]:.2%}" if p[c] is not None else "-" for c in ("agent", "chat"))
        lines.append(f"| {p['trace']} | {capacity} | {life} | {p['rate']:.2%} | {agent} | {chat} | {p['blocks']:,} | "
                     f"{p['removed']:,} | {p['stored_gb']:,.1f} GB |")  # fmt: skip
    return lines


def _tail(title: str, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = list(next(iter(rows.values())))
    lines = [f"| asked ({title}) | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(f"{row[c]:.2f}" for c in columns) + " |" for name, row in rows.items()]
    return [*lines, ""]
