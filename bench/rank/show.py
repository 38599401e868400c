"""What was measured of a rank, as a page and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rank.measure import OpTime, Step, by_op

RANKS = 64  # that share the experts of the full model


def save(path: Path, steps: Sequence[Step], about: dict[str, Any]) -> None:
    """`about` says what was measured where; a `note` in it is shown above the tables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"about": about, "steps": [s.as_dict() for s in steps]}, indent=1) + "\n", encoding="utf-8"
    )


def load(path: Path) -> tuple[list[Step], dict[str, Any]]:
    """Raises ValueError where the file is not one of `save`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        steps = [Step(**{**s, "ops": [OpTime(**o) for o in s["ops"]]}) for s in found["steps"]]
        return steps, found["about"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: got no measurement of a rank ({error}); `fathom bench rank` makes one") from error


def steps_table(steps: Sequence[Step]) -> list[str]:
    """Markdown rows: each step with its throughput, and how much of it its ops' bounds would take."""
    lines = [
        "| step | sequences | context | device | host waits | tokens/s | tokens/s a user | bounds of its ops |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for s in steps:
        rate = s.sequences * s.tokens / s.device_us * 1e6
        user = f"{1e6 / s.device_us:,.1f}" if s.kind == "decode" else "-"
        bound = sum(o.bound_us for o in s.ops)
        name = "decode" if s.kind == "decode" else f"prefill of {s.tokens:,}"
        lines.append(
            f"| {name} | {s.sequences} | {s.context:,} | {s.device_us / 1e3:,.2f} ms | {s.wall_us / 1e3:,.2f} ms | "
            f"{rate:,.0f} | {user} | {bound / 1e3:,.2f} ms, {bound / s.device_us * 100:.0f} % |"
        )
    return lines


def ops_table(step: Step) -> list[str]:
    """Markdown rows of one step: every op, and what the step takes besides."""
    lines = ["| op | calls | time | of the step | bound | of the bound |", "|---|---:|---:|---:|---:|---:|"]
    for one in by_op(step.ops):
        share = f"{one.bound_us / one.us * 100:.0f} %" if one.us else "-"
        lines.append(
            f"| `{one.op}` | {one.calls} | {one.us:,.0f} us | {one.us / step.device_us * 100:.0f} % | "
            f"{one.bound_us:,.0f} us | {share} |"
        )
    rest = step.device_us - sum(o.us for o in step.ops)
    lines.append(f"| the rest | | {rest:,.0f} us | {rest / step.device_us * 100:.0f} % | | |")
    return lines


def page(steps: Sequence[Step], about: dict[str, Any], picture: str | None) -> str:
    """The whole page."""
    lines = [
        "# One rank of 64",
        "",
        "`fathom bench rank` makes this page: `v41-flash-rank`, random weights in the stored formats, full width,",
        "40 layers, six routed experts and the shared one a layer. Every token goes to all six, which is the load",
        "of a rank when 64 ranks of the same batch choose evenly; sending between ranks is left out. Decode steps",
        "are CUDA graphs. Ops are timed alone with cold caches, so their sum may exceed a step, where what one op",
        "wrote is still near when the next reads it; *the rest* is what the step takes besides (PyTorch's copies",
        "and conversions, gaps), and below zero then.",
        "",
        f"{about['gpu']}; PyTorch {about['torch']}; {about['copy_gbps']} GB/s copied; "
        f"{about['bf16_tflops']} TFLOP/s bf16; {about['date']}",
        "",
        *([str(about["note"]), ""] if about.get("note") else []),
        *steps_table(steps),
        "",
    ]
    if picture:
        lines += [f"![throughput against speed and latency]({picture})", ""]
    for step in steps:
        what = f"Decode, {step.sequences} sequences" if step.kind == "decode" else f"Prefill of {step.tokens:,} tokens"
        lines += [f"## {what}", "", *ops_table(step), ""]
    return "\n".join(lines)


def draw(steps: Sequence[Step], path: Path) -> None:
    """Throughput of a rank against the speed a user sees, and against the time of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    decode = sorted((s for s in steps if s.kind == "decode"), key=lambda s: s.sequences)
    if not decode:
        raise ValueError("steps: got no decode step, allowed is at least one")
    rate = [s.sequences / s.device_us * 1e6 for s in decode]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    left.plot([1e6 / s.device_us for s in decode], rate, "o-", color="#2b6cb0")
    left.set_xlabel("tokens/s a user, without speculation")
    left.set_ylabel("tokens/s of the rank")
    right.plot([s.device_us / 1e3 for s in decode], rate, "o-", color="#2b6cb0")
    right.set_xlabel("time of a step, ms")
    for step, r in zip(decode, rate, strict=True):
        left.annotate(str(step.sequences), (1e6 / step.device_us, r), textcoords="offset points", xytext=(4, 4))
        right.annotate(str(step.sequences), (step.device_us / 1e3, r), textcoords="offset points", xytext=(4, 4))
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
