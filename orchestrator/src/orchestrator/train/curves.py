"""The log of a run as a small picture: loss, held-out bits a byte, learning rate and speed, phases shaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from orchestrator.train.log import read

_POINTS = 400
"""Points of a curve at most; longer logs are averaged to them, so that the file stays small."""
_SHADES = ("#ffffff", "#eef1f5")


def plot_curves(
    log: str | Path,
    out: str | Path,
    *,
    title: str,
    measure: str = "ce",
    label: str | None = None,
    bytes_per_token: float | None = None,
) -> Path:
    """Draw `log` (JSON lines of `orchestrator.train.loop`) to `out`, an SVG or PNG file by its ending; returns it.

    The upper part shows `measure` of training and evaluations under the name `label`. With `bytes_per_token` it is
    taken for nats a token and shown in bits a byte. Raises `ValueError` for a log without it, or another ending.
    """
    out = Path(out)
    if out.suffix not in (".svg", ".png"):
        raise ValueError(f"out: got {out.name}, allowed is a name that ends in .svg or .png")
    lines = read(log)
    steps = [line for line in lines if line.get(measure) is not None]
    if not steps:
        raise ValueError(f"log: {log} has no lines with {measure}")
    heldout = [line for line in lines if "evaluation" in line]

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    factor = 1 / (math.log(2) * bytes_per_token) if bytes_per_token else 1.0
    unit = "bits a byte" if bytes_per_token else "nats a token"
    label = label or (f"cross-entropy\n{unit}" if measure == "ce" else measure)
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "1"}):
        figure, (top, middle, bottom) = pyplot.subplots(
            3, 1, figsize=(7, 6.2), sharex=True, height_ratios=(3, 1, 1), layout="constrained"
        )
        for axis in (top, middle, bottom):
            _shade(axis, steps)
            axis.grid(alpha=0.3, linewidth=0.5)
        top.plot(*_thinned(steps, measure, factor), color="#2b6cb0", linewidth=1.2, label="training")
        _heldout(top, heldout, measure, factor)
        values = [line[measure] * factor for line in steps[len(steps) // 20 :]]
        top.set_ylim(min(values) * 0.95, max(values) * 1.05)  # the first twentieth may lie outside of the frame
        top.set_ylabel(label)
        top.legend(frameon=False)
        top.set_title(title, fontsize=10)
        middle.plot(*_thinned(steps, "lr", 1.0), color="#c05621", linewidth=1.2)
        middle.set_ylabel("learning\nrate")
        bottom.plot(*_thinned(steps, "tokens_per_second", 1e-3), color="#2f855a", linewidth=1.0)
        bottom.set_ylabel("thousand\ntokens/s")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("step")
        out.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if out.suffix == ".svg" else None
        figure.savefig(out, dpi=130, metadata=metadata)
        pyplot.close(figure)
    return out


def _thinned(lines: list[dict[str, Any]], key: str, factor: float) -> tuple[list[float], list[float]]:
    """Means over runs of neighbouring lines."""
    size = -(-len(lines) // _POINTS)
    xs, ys = [], []
    for begin in range(0, len(lines), size):
        part = [line for line in lines[begin : begin + size] if line.get(key) is not None]
        if part:
            xs.append(sum(line["step"] for line in part) / len(part))
            ys.append(factor * sum(line[key] for line in part) / len(part))
    return xs, ys


def _heldout(axis: Any, lines: list[dict[str, Any]], measure: str, factor: float) -> None:
    points = [(line["step"], line["evaluation"].get(measure)) for line in lines]
    points = [(step, value * factor) for step, value in points if value is not None]
    if points:
        axis.plot(*zip(*points, strict=True), "o-", color="#9b2c2c", markersize=3, linewidth=1, label="held out")


def _shade(axis: Any, lines: list[dict[str, Any]]) -> None:
    begin = 0
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        if following is None or following["phase"] != line["phase"]:
            axis.axvspan(begin, line["step"], color=_SHADES[line["phase"] % 2], linewidth=0, zorder=0)
            begin = line["step"]
    axis.set_xlim(0, lines[-1]["step"])
