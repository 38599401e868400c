"""What follows from the studies, in sentences whose numbers and verdicts come from the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.markdown import ms

Content = Mapping[str, Any]
NEEDS = ("workload", "rules", "bins", "mix", "side", "decode", "retention", "router")


def findings(_: object, content: Content) -> Iterator[str]:
    """One item for each question that the studies answer."""
    lines = [*_prefill(content), *_network(content), *_decode(content), *_kept(content), *_router(content)]
    yield "\n".join(f"- {line}" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _near(row: Content, load: float) -> Content:
    """The run nearest to a load."""
    found: Content = min(row["runs"], key=lambda run: abs(run["share"] - load))
    return found


def _word(difference: float) -> str:
    """Of points of load."""
    if abs(difference) < 0.015:
        return "changes nothing that these runs can tell"
    return f"{'costs' if difference < 0 else 'gains'} {100 * abs(difference):.0f} points"


def _prefill(content: Content) -> Iterator[str]:
    rows = {row["name"]: row for row in content["rules"]["rules"]}
    share = {name: row["share"] for name, row in rows.items()}
    up_to = {name: f"{row['mark']}{_percent(row['share'])}" for name, row in rows.items()}
    ours, published = rows["ours"], p.BALANCED_SHARE.value
    verdict = "beaten" if ours["low"] > published else "reached" if ours["share"] > published else "not reached"
    yield (
        f"**Share of a perfectly balanced run.** Ours holds 400 ms in the mean and 2 s at p99 up to "
        f"{_percent(ours['low'])} to {_percent(ours['high'])} of it; published is about {_percent(published)}, so that "
        f"is {verdict} by this model, on this traffic; the published figure is of another, and how it was taken is "
        f"not said. With all GPUs as one it would be {up_to['even']}."
    )
    yield (
        f"**By which rule.** Steps of 150 ms at most: with 300 ms the mean is missed from {up_to['steps to 300 ms']} "
        f"on. Then long prompts that give way: without, {up_to['first come first served']}. Then the common queue: "
        "without, "
        f"{up_to['sent at once']}. Binding to a rank late and not when pulled "
        f"{_word(share['ours'] - share['bound when pulled'])}; bins by missed tokens on top of it "
        f"{_word(share['with bins by missed'] - share['ours'])}; bins by length in its place hold "
        f"{up_to['bins by length instead']}."
    )
    low = {name: ms(_near(rows[name], 1 / 3)["mean"]) for name in ("ours", "long ones packed", "bins: missed")}
    yield (
        f"**Where ours loses.** At {_percent(_near(ours, 1 / 3)['share'])} of balanced its mean is {low['ours']} ms; "
        f"with long prompts kept to few engines it is {low['long ones packed']}, with bins by missed tokens "
        f"{low['bins: missed']}, because short prompts then share no steps with long ones. Under load, packing "
        f"{_word(share['long ones packed'] - share['ours'])}."
    )
    pushed = ("round robin", "power of two", "fewest requests", "fewest tokens")
    yield (
        f"**Sent to a rank at once**: {', '.join(f'{name} holds up to {up_to[name]}' for name in pushed)}. Few prompts "
        "hold much of the work, and a rank that got one is busy for seconds: counting requests doesn't see it. With "
        f"steps of 150 ms fewest tokens holds up to {up_to['sent at once']}."
    )
    yield from _bins(content, up_to)
    mix = {row["name"]: f"{row['mark']}{_percent(row['share'])}" for row in content["mix"]["rules"]}
    yield f"**Mixed traffic** of agents and chats: {', '.join(f'{name} {share}' for name, share in mix.items())}."


def _bins(content: Content, up_to: Mapping[str, str]) -> Iterator[str]:
    bins = {key: _percent(values[3]) for key, values in content["workload"]["bins"].items()}
    pairs = {row["name"]: _percent(row["share"]) for row in content["bins"]["rules"]}
    names = ("one queue", "bins: length", "bins: missed", "bins: cost")
    yield (
        f"**Bins.** By length the longest bin has {bins['requests by length']} of the requests and "
        f"{bins['missed tokens by length']} of the missed tokens, by missed tokens {bins['requests by missed']} and "
        f"{bins['missed tokens by missed']}. With steps up to 300 ms: "
        f"{', '.join(f'{name} {up_to[name]}' for name in names)}; where a token pays for its past: "
        f"{', '.join(f'{name} {pairs[name]}' for name in names)}. With 16 engines for 4 bins, "
        "an engine is a large unit."
    )


def _network(content: Content) -> Iterator[str]:
    runs = content["side"]
    cards = list(dict.fromkeys(name.split(",")[0] for name in runs))
    parts = []
    for card in cards:
        both, one = runs[f"{card}, both sides"], runs[f"{card}, prefill side only"]
        parts.append(
            f"with {card} a host the fetch takes {ms(both['split']['fetch'])} ms instead of "
            f"{ms(one['split']['fetch'])}, the first token {ms(both['mean'])} instead of {ms(one['mean'])}"
        )
    yield f"**Reading through the decode side as well**: {'; '.join(parts)}. It evens out bursts of an engine's pulls."


def _decode(content: Content) -> Iterator[str]:
    for name, rows in content["decode"].items():
        top = max(row["rate"] for row in rows)
        own = {row["rule"]: row for row in rows if row["rate"] == top}
        over = {rule: row["step"] / row["alike"] - 1 for rule, row in own.items()}
        order = ", ".join(f"{rule} {100 * x:.1f} %" for rule, x in sorted(over.items(), key=lambda item: item[1]))
        yield f"**Decode placement, {name}**, at {top:.0f} requests a second: steps over those of equal ranks: {order}."
    yield (
        "With 170 index bytes a token, the second dimension is worth little to V4.1-Flash: counting requests is nearly "
        "as good, and counting tokens alone about as bad as taking turns. It pays where a step reads the whole cache."
    )


def _kept(content: Content) -> Iterator[str]:
    rows = {row["life"]: row for row in content["retention"]["agentic"]}
    half, noon, days = rows[1800.0], rows[43_200.0], rows[259_200.0]
    yield (
        f"**Retention.** 72 hours instead of 30 minutes save {100 * (1 - days['gpus'] / half['gpus']):.1f} % of the "
        f"prefill GPUs on the agentic trace; 12 hours save {100 * (1 - noon['gpus'] / half['gpus']):.1f} % with "
        f"{_percent(noon['stored'] / days['stored'])} of the bytes. What later days bring the trace can't show."
    )


def _router(content: Content) -> Iterator[str]:
    most = content["router"][-1]
    yield (
        f"**Router.** With {most['engines']:,} engines the decisions of a request take {most['request']:.0f} us of a "
        f"core, {most['a_second']:,.0f} requests a second; the whole core as it is takes "
        f"{most['core']['request']:,.0f} us, "
        f"{most['core']['a_second']:,.0f} a second."
    )
