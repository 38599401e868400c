"""What was measured of the service, as a page with pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import findings

_BLUE, _RED, _GREY = "#2b6cb0", "#c05621", "#718096"
_COLOURS = (_BLUE, _RED, "#2f855a", "#6b46c1")

_SAYS = {
    "storm": "Processes are killed (SIGKILL), paused (SIGSTOP for 1 to 8 s) or drained at random times, whichever it "
    "hits, all of a role too; some clients go away by themselves. A worker that dies again within a minute of its "
    "start waits longer each time before the next one. First tokens wait for room and for processes that "
    "start; what a kill costs a stream is its silence.",
    "recovery": "One process is killed while clients stream; the time is until its successor works. Its start is the "
    "import of libraries and the load of the model, on cores that the others compute on. A stream notices only the end "
    "of its decode worker: its supervisor tells the router, and the request goes on from its last token elsewhere.",
    "latency": "Each client sends one request after the other. Workers on one machine share its cores: each has its "
    "part, one thread at least, where one process that does everything has them all, and reads a prompt sooner. "
    "Decode workers that never wait for a prompt give the later tokens faster; with many clients on so few cores it is "
    "the first token that waits for it.",
    "prefixes": "The last row's workers had nothing in their memory: what they hit came from the store of all.",
    "transfer": "From prefill to decode workers, over shared memory. Short prompts are one step, so that their state "
    "is made at its end; longer ones are sent while they are computed.",
}
_ON_A_GPU = {
    "latency": "Each client sends one request after the other; 16 run at once in one engine. All processes share the "
    "GPU and take turns on it, so the figures say what the hand-over costs and not what two GPUs would give. The model "
    "is so small that a step's time is that of its launches.",
}


def load(path: Path) -> dict[str, Any]:
    """Raises ValueError where the file holds something else."""
    return findings.load(path, "a service", "fathom bench service", ("about",))


def tables(found: Mapping[str, Any]) -> list[str]:
    """Markdown of all that was measured."""
    lines: list[str] = []
    says = _SAYS if found["about"]["device"] == "cpu" else _SAYS | _ON_A_GPU
    for part, title, make in (
        ("storm", "Requests while processes die", _storm), ("recovery", "One kill", _recovery),
        ("latency", "Clients", _latency), ("prefixes", "Prefixes", _prefixes),
        ("transfer", "States that moved", _transfer),
    ):  # fmt: skip
        if found.get(part):
            lines += [f"## {title}", "", says[part], "", *make(found[part]), ""]
    for row in found.get("ends", ()):
        left = (
            f"{len(row['left'])} processes were left: {', '.join(row['left'])}" if row["left"] else "nothing was left"
        )
        lines.append(f"After SIGTERM the front of {row['shape']} ended with status {row['status']}; {left}.")
    return lines


def _storm(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| service | requests | at once | faults | left by themselves | lost or repeated tokens | told to come back | "
        "first token, median and largest | streams with more than 1 s of silence | longest silence | "
        "memory of all, before and after |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        faults = ", ".join(f"{count} x {name}" for name, count in sorted(row["faults"].items()))
        gap, first = row["gap_s"], row["first_s"]
        lines.append(
            f"| {row['shape']} | {row['requests']} | {row['at_once']} | {faults} | {row['left']} | {len(row['wrong'])} "
            f"| {row['refusals']} | {first['p50']:.1f} s, {first['max']:.1f} s | {row['silent']} "
            f"| {gap['max']:.1f} s | {_megabytes(row['memory_before'])}, {_megabytes(row['memory_after'])} |"
        )
    return lines


def _megabytes(memory: Mapping[str, int]) -> str:
    return f"{sum(memory.values()) / 2**20:,.0f} MiB"


def _recovery(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| service | killed | kills | until it works again, median and largest | "
        "longest silence in a stream on its way | of these streams above 1 s | "
        "longest wait of any client | wrong answers |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, role in dict.fromkeys((row["shape"], row["role"]) for row in rows):
        some = [row for row in rows if (row["shape"], row["role"]) == (shape, role)]
        up = sorted(row["up_s"] for row in some)
        waited, asked = sum(row["stopped"] for row in some), sum(row["flowing"] for row in some)
        lines.append(
            f"| {shape} | {role} | {len(some)} | {median(up):.1f} s, {up[-1]:.1f} s | "
            f"{max(row['flowing_gap_s'] for row in some):.1f} s | {waited} of {asked} "
            f"| {max(row['gap_s'] for row in some):.1f} s | {sum(len(row['wrong']) for row in some)} |"
        )
    return lines


def _latency(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| service | clients | prompt tokens | first token, median | 90th percentile | a token after it, median | "
        "90th percentile | tokens a second |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        first, token = row["first_ms"], row["token_ms"]
        lines.append(
            f"| {row['shape']} | {row['at_once']} | {row['prompt_tokens']} | {first['p50']:,.0f} ms "
            f"| {first['p90']:,.0f} ms | {token['p50']:.1f} ms | {token['p90']:.1f} ms "
            f"| {row['tokens_a_second']:,.0f} |"
        )
    return lines


def _prefixes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| service | prompt | tokens | of them from a cache | first token, median |", "|---|---|---:|---:|---:|"]
    return lines + [
        f"| {row['shape']} | {row['way']} | {row['prompt_tokens']:,} | {row['cached_tokens']:,} | "
        f"{row['first_ms']['p50']:,.0f} ms |"
        for row in rows
    ]  # fmt: skip


def _transfer(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| service | of | states | MiB each | sent before the prompt was done | there before the load began | "
        "a load's wait | rate of what was left |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        each = row["bytes"] / max(1, row["handoffs"]) / 2**20
        rate = f"{row['rate'] / 2**20:,.0f} MiB/s" if row["there"] < 1 else "-"
        lines.append(
            f"| {row['shape']} | {row['of']} | {row['handoffs']} | {each:.2f} | {row['ahead']:.0%} "
            f"| {row['there']:.0%} | {row['load_ms']:.1f} ms | {rate} |"
        )
    return lines


def draw(found: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """The pictures that can be drawn of it."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    for part, make in (("latency", _draw_latency), ("recovery", _draw_recovery), ("storm", _draw_storm)):
        if found.get(part):
            made.append(folder / f"{stem}_{part}.png")
            make(found[part], made[-1])
    return made


def _draw_latency(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for colour, shape in zip(_COLOURS, dict.fromkeys(row["shape"] for row in rows), strict=False):
        some = [row for row in rows if row["shape"] == shape]
        counts = [row["at_once"] for row in some]
        for axis, key in zip(axes, ("first_ms", "token_ms"), strict=True):
            axis.plot(counts, [row[key]["p50"] for row in some], "o-", color=colour, label=shape)
            axis.plot(counts, [row[key]["p90"] for row in some], "o:", color=colour)
    for axis, title in zip(axes, ("to the first token, ms", "a token after it, ms"), strict=True):
        axis.set(title=title, xlabel="clients at once (dotted: 90th percentile)", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend()
    _save(figure, path)


def _draw_recovery(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    names = list(dict.fromkeys((row["shape"].split(", ")[-1], row["role"]) for row in rows))
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for place, name in enumerate(names):
        some = [row for row in rows if (row["shape"].split(", ")[-1], row["role"]) == name]
        axis.plot(
            [place - 0.12] * len(some),
            [r["up_s"] for r in some],
            "o",
            color=_BLUE,
            label=None if place else "works again",
        )
        axis.plot(
            [place + 0.12] * len(some),
            [r["flowing_gap_s"] for r in some],
            "s",
            color=_RED,
            label=None if place else "longest silence of a stream",
        )
    axis.set_xticks(range(len(names)), [f"{role}\n{launcher}" for launcher, role in names])
    axis.set(ylabel="seconds after the kill", ylim=(0, None))
    axis.legend()
    axis.grid(alpha=0.3, axis="y")
    _save(figure, path)


def _draw_storm(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Every request a line from its start to its end; kills are upright."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 1, figsize=(10, 3.8 * len(rows)), squeeze=False)
    for (axis,), row in zip(axes, rows, strict=True):
        for place, (began, ended, gap) in enumerate(sorted(row["spans"])):
            axis.plot([began, ended], [place, place], color=_RED if gap > 1.0 else _BLUE, linewidth=0.8)
        for at, name in row["fault_times"]:
            axis.axvline(at, color=_GREY, linewidth=0.6)
            axis.text(at, len(row["spans"]), name, rotation=90, fontsize=5, va="top", ha="right", color=_GREY)
        kinds = ", ".join(sorted({kind.split()[0] for kind in row["faults"]}))
        title = f"{row['shape']}, {row['requests']} requests, {kinds}: red streams fell silent for more than 1 s"
        axis.set(
            title=title, xlabel="seconds", ylabel="requests", xlim=(0, row["seconds"]), ylim=(0, len(row["spans"]) + 1)
        )  # fmt: skip
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def page(found: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The whole page."""
    about = found["about"]
    on_cpu = about["device"] == "cpu"
    device = "its CPU" if on_cpu else f"one {about['machine']} that all processes share"
    lines = [
        f"# The service, measured{'' if on_cpu else ' on a GPU'}",
        "",
        "Measured by `fathom bench service`: several processes serve while clients stream and processes are killed. "
        "What clients get is compared, token by token and with log-probabilities, with what one undisturbed process "
        "gives.",
        "",
        f"**These figures say how the service behaves, not how fast it is**: {about['model']} on {device}, clients and "
        f"all workers on the same {about['cores']} cores. {about['machine'] + ', ' if on_cpu else ''}"
        f"Python {about['python']}, load {about['load']} when it began; {about['date']}.",
        "",
        "```",
        "fathom bench service                         all of it, local processes",
        "fathom bench service --clusters local,ray    the same under Ray as well",
        "fathom bench service --parts storm --requests 200 --mean 5 --kinds kill,pause,drain --seed 21 --out FILE",
        "fathom bench service --device cuda           two engine processes on one NVIDIA GPU",
        "fathom bench service --quick                 to try the command",
        "fathom bench service --from FILE --page docs/service_measured.md",
        "```",
        "",
    ]
    lines += [about["note"], ""] if about.get("note") else []
    lines += [line for name in pictures for line in (f"![{name.rpartition('_')[2].partition('.')[0]}]({name})", "")]
    return "\n".join([*lines, *tables(found)]) + "\n"
