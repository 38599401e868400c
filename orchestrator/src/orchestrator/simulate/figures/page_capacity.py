"""Tables and sentences of traffic, retention, capacity, router, faults and constants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from orchestrator.simulate.figures.markdown import table

Content = Mapping[str, Any]


def workload(content: Content, _: Content) -> Iterator[str]:
    """What the agentic trace asks for."""
    yield (
        f"The agentic trace: {content['sessions']:,} sessions, {content['requests']:,} requests; in the mean "
        f"{content['input']:,.0f} tokens in, {content['missed']:,.0f} of them missed (hit rate "
        f"{100 * content['hit_rate']:.2f} % in blocks of 128), {content['output']:.0f} out."
    )
    edges = [f"{edge // 1024}K" for edge in content["edges"]]
    names = [f"below {edges[0]}", *(f"{a} to {b}" for a, b in pairwise(edges)), f"{edges[-1]} on"]
    rows = ((key, *(f"{100 * v:.1f} %" for v in values)) for key, values in content["bins"].items())
    yield table(("share in each bin", *names), rows)


def _lives(rows: Sequence[Content]) -> str:
    head = ("kept for", "hits", "missed tokens a request", "prefill GPUs", "balanced", "written", "stored")
    return table(
        head,
        (
            (
                f"{r['life'] / 3600:g} h" if r["life"] >= 3600 else f"{r['life'] / 60:g} min",
                f"{100 * r['hit_rate']:.2f} %", f"{r['missed']:,.0f}", f"{r['gpus']:.1f}", f"{r['even_gpus']:.1f}",
                f"{r['written'] / 1e9:.2f} GB/s", f"{r['stored'] / 1e12:,.1f} TB",
            )
            for r in rows
        ),
    )  # fmt: skip


def retention(content: Content, _: Content) -> Iterator[str]:
    """Hits and bytes by life."""
    rows = {row["life"]: row for row in content["agentic"]}
    yield (
        "By arithmetic on the traces, for 1,000 requests a second: prefill GPUs at the published 60,000 missed tokens "
        "a second each and in a perfectly balanced run, bytes written and kept before erasure code. Prompts only; a "
        "block stays for so long after its last use."
    )
    yield "**Agentic**"
    yield _lives(content["agentic"])
    half, noon, days = rows[1800.0], rows[43200.0], rows[259200.0]
    first, later = _worth(half, noon), _worth(noon, days)
    points = 100 * (days["hit_rate"] - half["hit_rate"])
    yield (
        f"From 30 minutes to 72 hours, hits rise by {points:.2f} points and {_saved(half, days):.1f} % of the prefill "
        f"GPUs are saved. 12 hours save {_saved(half, noon):.1f} % already ({first:.0f} GPUs for each further PB); the "
        f"step from there to 72 hours saves {_saved(noon, days):.2f} % ({later:.2f} GPUs a PB) for "
        f"{days['stored'] / noon['stored']:.1f} times the bytes. The trace can't show more: a user who comes back on "
        "another day is another session in it, its longest pause is 21.6 hours, and prefixes common to sessions are "
        "not in its ids. What it says of 72 hours is a lower bound."
    )
    yield "**Mooncake, chats of one hour**; a longer life can't be judged from an hour:"
    yield _lives(content["mooncake"])


def _saved(before: Content, after: Content) -> float:
    """Prefill GPUs that a longer life saves, in percent."""
    return 100 * (1 - after["gpus"] / before["gpus"])


def _worth(before: Content, after: Content) -> float:
    """GPUs saved for each further PB that is stored."""
    more = after["stored"] - before["stored"]
    return 1e15 * (before["gpus"] - after["gpus"]) / more if more > 0 else 0.0


def capacity(content: Sequence[Content], others: Content) -> Iterator[str]:
    """Needs by traffic and peak, and how each is made."""
    head = [f"{c['traffic']['name']}, peak {c['peak']:g} x mean" for c in content]
    yield (
        "By arithmetic. Which tokens the published number counts is not said; here input with hits, and output. 719 "
        "output tokens a request are those for which the published rates need as many decode GPUs as prefill ones. "
        "GPUs, reads and transfers are those of the peak, bytes stored and written those of the mean."
    )
    lines = content[0]["lines"]
    rows = ((_named(line), *(_number(c["lines"][i]["value"]) for c in content)) for i, line in enumerate(lines))
    yield table(("", *head), rows)
    yield from _held(content, others)
    yield "Assumptions, with the numbers of the first column:"
    yield "\n".join(f"- {line['what']}: {line['how']}." for line in lines)


def _named(line: Content) -> str:
    return line["what"] if line["unit"] in ("-", "GPUs", "nodes") else f"{line['what']}, {line['unit']}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"


def _held(content: Sequence[Content], others: Content) -> Iterator[str]:
    """The same by the simulation and by the trace's own uses, where those studies have run."""
    if not (others.get("rules") and others.get("retention")):
        return
    ours = next(row for row in others["rules"]["rules"] if row["name"] == "ours")
    last = content[-2]["lines"]  # the trace, at the mean
    requests = last[0]["value"]
    rate = ours["low"] * others["rules"]["full_rate"]
    stored = next(row["stored"] for row in others["retention"]["agentic"] if row["life"] == 259_200.0)
    yield (
        f"By the simulation, 64 prefill GPUs hold the targets of this page up to {rate:,.0f} requests a second of the "
        f"agentic trace, so {requests:,.0f} need {64 * math.ceil(requests / rate):,} of them rather than the "
        f"{last[1]['value']:,.0f} of the published rate, which is that of the shortest published step. By the trace's "
        f"own uses, 72 hours keep {stored * requests / 1e18:.1f} PB rather than {last[4]['value']:.1f}: an answer that "
        "comes back in the next prompt is counted once there."
    )


def router(content: Sequence[Content], _: Content) -> Iterator[str]:
    """Cost of decisions."""
    yield (
        "Measured: microseconds of one core for a decision of the policies in `balance`, in Python, on a CPU shared "
        "with other work. Half of the engines are in prefill, half in decode, in groups of 64; 100 tenants."
    )
    head = ("us", *(f"{c['engines']:,} engines" for c in content))
    of_request = content[0]["of_request"]
    rows = [
        (f"{name}{' *' if name in of_request else ''}", *(f"{c['decisions'][name]:.1f}" for c in content))
        for name in content[0]["decisions"]
    ]
    rows.append(("a request, the sum of *", *(f"{c['request']:.1f}" for c in content)))
    rows.append(("requests a second on one core", *(f"{c['a_second']:,.0f}" for c in content)))
    yield table(head, rows)
    yield (
        "The whole core of the router (`roles.router`), as the server runs it: every engine reports twice a second and "
        "holds requests, 20 in decode and 3 in prefill. Messages are not encoded or sent."
    )
    parts = {
        "submit": "a request comes and is placed",
        "release": "it ends",
        "report": "an engine reports",
        "beat": "all is looked over, twice a second",
    }
    rows = [(says, *(f"{c['core'][part]:,.1f}" for c in content)) for part, says in parts.items()]
    rows.append(("reports and beats, of a core", *(f"{100 * c['core']['fixed']:.1f} %" for c in content)))
    rows.append(("requests a second on one core", *(f"{c['core']['a_second']:,.0f}" for c in content)))
    yield table(head, rows)
    most = content[-1]
    yield (
        f"With {most['engines']:,} engines the core takes {most['core']['request'] / most['request']:.0f} times what "
        "its decisions cost: it looks at every engine anew for each request."
    )


def faults(content: Content, _: Content) -> Iterator[str]:
    """Totals of the matrix, and the slowest to recover."""
    met = [cell for cell in content["cells"] if cell["runs"]]
    yield (
        f"`fathom simulate --matrix`: {content['runs']:,} runs in which a fault met a request in the phase, over "
        f"{len({c['fault'] for c in met})} kinds of faults and {len({c['phase'] for c in met})} phases. Requests lost: "
        f"{content['lost']}; tokens repeated: {content['repeated']}; cells with an invariant that failed: "
        f"{content['failed']}. Seconds are virtual, until every stream that was open at the fault goes on; links and "
        "machines are cut for up to 6 s."
    )
    slow = sorted(met, key=lambda cell: -cell["recover_s"]["median"])[:8]
    rows = (
        (
            f"{c['fault']} while {c['phase']}",
            c["runs"],
            f"{c['recover_s']['median']:.2f}",
            f"{c['recover_s']['most']:.2f}",
            f"{c['slower_s']['median']:.2f}",
        )
        for c in slow
    )
    yield table(("slowest to recover", "runs", "median, s", "most, s", "answer later by, median s"), rows)


def constants(content: Sequence[Content], _: Content) -> Iterator[str]:
    """All constants with their origin."""
    rows = ((c["name"], f"{c['value']:.6g}", c["unit"], c["kind"], c["origin"]) for c in content)
    yield table(("constant", "value", "unit", "kind", "origin"), rows)
