"""Pictures of the studies as PNG files, one idea each. The same results give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Content = Mapping[str, Any]
BLUE, ORANGE, GREY, GREEN, RED = "#2b6cb0", "#c05621", "#718096", "#2f855a", "#9b2c2c"
_SHOWN = {
    "even": ("#000000", ":"),
    "ours": (BLUE, "-"),
    "one queue": (GREEN, "-"),
    "bins: length": (ORANGE, "-"),
    "bins: missed": (ORANGE, "--"),
    "fewest tokens": (RED, "-"),
    "power of two": (RED, "--"),
    "round robin": (RED, ":"),
}


def write(folder: Path, content: Content) -> list[Path]:
    """A picture for every study that has run; returns their paths. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("pictures: matplotlib is not installed; pip install matplotlib") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    style: Any = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with matplotlib.rc_context(style):
        for name, (width, height, panels, draw) in PICTURES.items():
            if not content.get(name):
                continue
            figure = Figure(figsize=(width, height), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots(1, panels, squeeze=False)[0]
            draw(list(axes), content[name])
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], format="png", dpi=110, metadata={"Software": None})
    return written


def _rules(axes: list[Any], content: Content) -> None:
    targets = content["targets"]
    for row in content["rules"]:
        if row["name"] not in _SHOWN:
            continue
        colour, line = _SHOWN[row["name"]]
        share = [100 * r["share"] for r in row["runs"]]
        for panel, key in zip(axes, ("mean", "p99"), strict=False):
            panel.plot(share, [r[key] for r in row["runs"]], line, color=colour, marker=".", label=row["name"])
    for panel, key, title in zip(axes, ("mean", "p99"), ("mean", "99th percentile"), strict=False):
        panel.axhline(targets[key], color=GREY, linewidth=0.8)
        panel.set_yscale("log")
        ticks = (0.1, 0.2, 0.4, 1, 2, 5)
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel("load, % of a perfectly balanced offline run")
        panel.set_ylabel("s")
        panel.set_title(f"Time to the first token, {title}")
    axes[0].legend(fontsize=7)
    _shares(axes[2], content)


def _shares(axes: Any, content: Content) -> None:
    rows = sorted(content["rules"], key=lambda row: row["share"])
    for y, row in enumerate(rows):
        colour = {"ours": BLUE, "even": "#000000"}.get(row["name"], GREY)
        axes.barh(y, 100 * row["share"], color=colour, height=0.7)
        if row["seeds"] > 1:
            axes.plot([100 * row["low"], 100 * row["high"]], [y, y], color=ORANGE, linewidth=2)
        axes.text(100 * row["share"] + 1, y, f"{row['mark']} {100 * row['share']:.0f}", va="center")
    axes.axvline(80, color=RED, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_xlim(0, 105)
    axes.set_xlabel("% of a perfectly balanced offline run")
    axes.set_title("Load up to which targets hold; line: published")


def _rising(axes: list[Any], content: Content) -> None:
    for (name, runs), colour in zip(content.items(), (ORANGE, BLUE), strict=True):
        axes[0].plot([r["rate"] for r in runs], [r["goodput"] for r in runs], color=colour, marker=".", label=name)
    rates = [r["rate"] for runs in content.values() for r in runs]
    axes[0].plot([0, max(rates)], [0, max(rates)], color=GREY, linewidth=0.8)
    axes[0].set_xlabel("requests a second offered")
    axes[0].set_ylabel("in time, a second")
    axes[0].set_title("Goodput: first token in 2 s, then 10 ms each")
    axes[0].legend()
    runs = [r for r in content["refused when late"] if r["refused"] < 0.5]
    below = [0.0] * len(runs)
    for part in runs[0]["split"]:
        values = [1e3 * r["split"][part] for r in runs]
        axes[1].bar(range(len(runs)), values, bottom=below, label=part, width=0.8)
        below = [b + v for b, v in zip(below, values, strict=True)]
    axes[1].set_xticks(range(len(runs)), [f"{r['rate']:.0f}" for r in runs])
    axes[1].set_xlabel("requests a second offered")
    axes[1].set_ylabel("ms")
    axes[1].set_title("Mean time to the first token, by part")
    axes[1].set_ylim(0, 1.4 * max(below))
    axes[1].legend(fontsize=7, ncols=2, loc="upper left")
    axes[2].plot([r["rate"] for r in runs], [1e3 * r["token"] for r in runs], color=BLUE, marker=".", label="mean")
    axes[2].plot([r["rate"] for r in runs], [1e3 * r["token_p99"] for r in runs], color=ORANGE, marker=".", label="p99")
    axes[2].axhline(1e3 / 230, color=GREY, linewidth=0.8)
    axes[2].set_ylim(0)
    axes[2].set_xlabel("requests a second offered")
    axes[2].set_ylabel("ms")
    axes[2].set_title("Time a token; line: 230 a second")
    axes[2].legend()


def _bars(axes: list[Any], content: Content) -> None:
    _shares(axes[0], content)


def _decode(axes: list[Any], content: Content) -> None:
    colours = dict(zip(("round robin", "power of two", "fewest requests", "fewest tokens", "two dimensions"),
                       (RED, ORANGE, GREY, GREEN, BLUE), strict=True))  # fmt: skip
    for panel, (name, rows) in zip(axes, content.items(), strict=False):
        for rule, colour in colours.items():
            own = [row for row in rows if row["rule"] == rule]
            over = [100 * (row["step"] / row["alike"] - 1) for row in own]
            panel.plot([row["rate"] for row in own], over, color=colour, marker=".", label=rule)
        panel.set_ylim(0)
        panel.set_xlabel("requests a second into 64 ranks")
        panel.set_ylabel("step over that of equal ranks, %")
        panel.set_title(name)
    axes[0].legend()


def _retention(axes: list[Any], content: Content) -> None:
    rows = content["agentic"]
    hours = [row["life"] / 3600 for row in rows]
    axes[0].plot(hours, [row["gpus"] for row in rows], color=BLUE, marker=".")
    axes[0].set_ylabel("prefill GPUs for 1,000 requests a second")
    axes[0].set_ylim(0)
    axes[1].plot(hours, [row["stored"] / 1e12 for row in rows], color=ORANGE, marker=".")
    axes[1].set_yscale("log")
    axes[1].set_ylabel("TB stored for 1,000 requests a second")
    for panel in axes:
        panel.set_xscale("log")
        panel.set_xticks([0.5, 1, 3, 12, 72], ["30 min", "1 h", "3 h", "12 h", "72 h"])
        panel.set_xlabel("blocks kept after their last use")
    axes[0].set_title("Agentic trace: what retention saves")
    axes[1].set_title("and what it keeps")


def _faults(axes: list[Any], content: Content) -> None:
    phases = content["phases"]
    kinds = list(dict.fromkeys(cell["fault"] for cell in content["cells"]))
    grid = [[float("nan")] * len(phases) for _ in kinds]
    panel = axes[0]
    for cell in content["cells"]:
        i, j = kinds.index(cell["fault"]), phases.index(cell["phase"])
        if not cell["runs"]:
            continue
        grid[i][j] = cell["recover_s"]["median"]
        bad = cell["lost"] or cell["repeated"] or cell["failed"]
        text = f"{cell['lost']} / {cell['repeated']}" if bad else f"{cell['recover_s']['median']:.1f}"
        panel.text(j, i, text, ha="center", va="center", color=RED if bad else "black", fontsize=6)
    panel.imshow(grid, cmap="Blues", aspect="auto", vmin=0, alpha=0.6)
    panel.set_xticks(range(len(phases)), phases)
    panel.set_yticks(range(len(kinds)), kinds)
    panel.set_title("Median virtual seconds until every open stream goes on; red: requests lost / tokens repeated")


PICTURES: dict[str, tuple[float, float, int, Callable[[list[Any], Any], None]]] = {
    "rules": (12.5, 4.2, 3, _rules),
    "rising": (12.5, 3.4, 3, _rising),
    "bins": (5.5, 2.4, 1, _bars),
    "mix": (5.5, 2.4, 1, _bars),
    "decode": (9.0, 3.2, 2, _decode),
    "retention": (8.0, 3.0, 2, _retention),
    "faults": (9.0, 6.5, 1, _faults),
}
