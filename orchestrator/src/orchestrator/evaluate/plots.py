"""Small SVG plots, one idea each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.evaluate.bits import Bits
from orchestrator.evaluate.calibration import Reliability
from orchestrator.evaluate.results import Results

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#c05621", "#718096"
_NEVER_CHANGES = {"Date": None, "Creator": None}


def write_plots(folder: str | Path, results: Results) -> list[Path]:
    """One file for every section with data; returns their paths. The same results give the same bytes.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("plots: matplotlib is not installed; pip install matplotlib") from None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    style: Any = {"svg.hashsalt": "fathom", "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False}
    with matplotlib.rc_context({**style, "axes.spines.right": False}):
        for name, (draw, present) in _PLOTS.items():
            if present(results):
                path = folder / f"{name}.svg"
                _save(path, draw, results)
                written.append(path)
    return written


def _save(path: Path, draw: Callable[[Any, Results], None], results: Results) -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure.add_subplot(), results)
    figure.savefig(path, format="svg", metadata=_NEVER_CHANGES)


def _draw_bits(axes: Any, results: Results) -> None:
    """The decoder replay is scored on other tokens, so it is drawn as its ratio on the engine's figure."""
    rows = results.bits
    engine = rows[0].bits_per_byte
    heights = [engine * r.ratio for r in rows]
    errors = [2 * (r.stderr if r is rows[0] else engine * r.ratio_stderr) for r in rows]
    colours = [_BLUE, *[_GREY] * (len(rows) - 1)]
    axes.bar([r.name for r in rows], heights, yerr=errors, color=colours, capsize=4, width=0.6)
    for i, row in enumerate(rows):
        label = f"{heights[i]:.3f}" if i == 0 else f"{100 * (row.ratio - 1):+.2f} %\n±{200 * row.ratio_stderr:.2f}"
        axes.text(i, heights[i] + errors[i], label, ha="center", va="bottom")
    axes.set_ylim(0, 1.2 * max(h + e for h, e in zip(heights, errors, strict=True)))
    axes.set_ylabel("bits per byte")
    axes.set_title("Held-out text, change against the engine; ±: 2 standard errors")


def _draw_replay(axes: Any, results: Results) -> None:
    styles = {"decoder replay": (_GREY, "o"), "hit": (_BLUE, "s"), "hit, decoder replay": (_ORANGE, "^")}
    hits = list(results.replay)
    for i, (name, (colour, marker)) in enumerate(styles.items()):
        rows: list[Bits] = [next(r for r in results.replay[h] if r.name == name) for h in hits]
        x = [h * 1.04 ** (i - 1) for h in hits]  # side by side
        values, errors = [100 * (r.ratio - 1) for r in rows], [200 * r.ratio_stderr for r in rows]
        axes.errorbar(x, values, yerr=errors, color=colour, marker=marker, capsize=3, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(hits, [str(h) for h in hits])
    axes.set_xlabel("tokens of the prefix hit")
    axes.set_ylabel("more bits than cold and exact, %")
    axes.set_title("What replay costs; bars: 2 standard errors")
    axes.legend(frameon=False)


def _draw_acceptance(axes: Any, results: Results) -> None:
    last = results.acceptance[-1].kind
    marks = {True: (_BLUE, "o", "greedy"), False: (_ORANGE, "s", "temperature 1")}
    for a in results.acceptance:
        colour, marker, label = marks[a.temperature == 0]
        if a.kind != last:
            continue
        x = range(1, len(a.rates) + 1)
        y, errors = [r.value for r in a.rates], [2 * r.stderr for r in a.rates]
        label = f"{label}: {a.length.value:.2f} tokens a step"
        axes.errorbar(x, y, yerr=errors, color=colour, marker=marker, capsize=3, label=label)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, 1 + max(len(a.rates) for a in results.acceptance)))
    axes.set_xlabel("draft")
    axes.set_ylabel("kept, if those before it were")
    axes.set_title("Acceptance by place; bars: 2 standard errors")
    axes.legend(frameon=False)


def _draw_calibration(axes: Any, results: Results) -> None:
    assert results.calibration is not None
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    pairs: list[tuple[str, Reliability, str, str]] = [
        ("without temperatures", results.calibration.before[-1], _GREY, "o"),
        ("fitted on other steps", results.calibration.after[-1], _BLUE, "s"),
    ]
    for label, r, colour, marker in pairs:
        x, y = [b.predicted for b in r.bins], [b.observed for b in r.bins]
        axes.plot(x, y, color=colour, marker=marker, label=f"{label}: error {r.ece:.3f}")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("predicted chance that a draft survives")
    axes.set_ylabel("observed")
    axes.set_title("Confidence of drafts, all places")
    axes.legend(frameon=False)


def _draw_recall(axes: Any, results: Results) -> None:
    context = max(r.context for r in results.recall)
    rows = [r for r in results.recall if r.context == context]
    ways = {"best": (_GREY, "best rows"), "float32": (_ORANGE, "float32 scores"), "selected": (_BLUE, "selected")}
    for i, (way, (colour, label)) in enumerate(ways.items()):
        x = [k + (i - 1) * 0.27 for k in range(len(rows))]
        values, errors = [r.shares[way].value for r in rows], [2 * r.shares[way].stderr for r in rows]
        axes.bar(x, values, yerr=errors, width=0.25, color=colour, label=label, capsize=2)
    axes.set_xticks(range(len(rows)), [f"{r.layer}" for r in rows])
    axes.set_ylim(0, 1.15)
    axes.set_xlabel("selecting layer")
    axes.set_ylabel("share of attention mass")
    axes.set_title(f"Mass on compressed rows that {rows[0].chosen} rows hold, {context} tokens")
    axes.legend(frameon=False, ncols=3, loc="upper center")


def _draw_needle(axes: Any, results: Results) -> None:
    lengths = list(dict.fromkeys((n.every_row, n.tokens) for n in results.needle))
    depths = list(dict.fromkeys(n.depth for n in results.needle))
    cells = {((n.every_row, n.tokens), n.depth): n for n in results.needle}
    grid = [[cells[t, d].exact / cells[t, d].trials for d in depths] for t in lengths]
    axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for i, t in enumerate(lengths):
        for j, d in enumerate(depths):
            axes.text(j, i, f"{cells[t, d].exact}/{cells[t, d].trials}", ha="center", va="center")
    axes.set_xticks(range(len(depths)), [f"{d:g}" for d in depths])
    axes.set_yticks(range(len(lengths)), [f"{t}\n(every row)" if every_row else str(t) for every_row, t in lengths])
    axes.set_xlabel("depth of the value in the text")
    axes.set_ylabel("tokens")
    axes.set_title("Values written back exactly")


_PLOTS: dict[str, tuple[Callable[[Any, Results], None], Callable[[Results], bool]]] = {
    "bits": (_draw_bits, lambda r: bool(r.bits)),
    "replay": (_draw_replay, lambda r: bool(r.replay)),
    "acceptance": (_draw_acceptance, lambda r: bool(r.acceptance)),
    "calibration": (_draw_calibration, lambda r: r.calibration is not None),
    "recall": (_draw_recall, lambda r: bool(r.recall)),
    "needle": (_draw_needle, lambda r: bool(r.needle)),
}
