"""Results for people: tables on the terminal, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.evaluate.bits import Bits
from orchestrator.evaluate.card import Comparison
from orchestrator.evaluate.needle import Needle
from orchestrator.evaluate.recall import WAYS, Recall
from orchestrator.evaluate.results import Results
from orchestrator.evaluate.statistics import Estimate


def print_results(console: Console, results: Results, comparisons: Sequence[Comparison] = ()) -> None:
    """A table a section, then the comparison with the model's card, then notes."""
    for table in tables(results):
        console.print(table)
    if comparisons:
        console.print(comparison_table(comparisons))
    for note in results.notes:
        console.print(f"Note: {note}", markup=False, highlight=False)


def write_json(path: str | Path, results: Results) -> None:
    """Everything, with numbers that are not known as null."""
    text = json.dumps(plain(results), indent=1, allow_nan=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


def plain(results: Results) -> dict[str, Any]:
    """What `write_json` writes."""
    return json.loads(json.dumps(_clean(results.as_json()), allow_nan=False))


def tables(results: Results) -> Iterator[Table]:
    """One for every section that ran."""
    if results.bits:
        yield _bits_table("Bits per byte of held-out text", results.bits)
    for hit, rows in results.replay.items():
        yield _bits_table(f"After a prefix hit of {hit} tokens", rows)
    if results.acceptance:
        yield _acceptance_table(results)
    if results.calibration is not None:
        yield _calibration_table(results)
    for context in dict.fromkeys(r.context for r in results.recall):
        yield _recall_table(context, [r for r in results.recall if r.context == context])
    if results.needle:
        yield _needle_table(results.needle)


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """The card's figures beside those of this run."""
    differing = sum(not c.within for c in comparisons)
    title = f"Against the model's card: {differing} of {len(comparisons)} figures differ by more than chance explains"
    table = _table(title, "figure", "unit", "card", "here", "difference", "noise", "same")
    for c in comparisons:
        row = (f"{c.card:.4f}", f"{c.here:.4f}", f"{c.difference:+.4f}", f"{c.noise:.4f}")
        table.add_row(c.name, c.unit, *row, "yes" if c.within else "NO")
    return table


def _bits_table(title: str, rows: Sequence[Bits]) -> Table:
    table = _table(title, "run", "bits/byte", "over exact", "windows", "tokens")
    for row in rows:
        own, ratio = Estimate(row.bits_per_byte, row.stderr), Estimate(row.ratio, row.ratio_stderr)
        table.add_row(row.name, _pm(own), _pm(ratio), str(row.windows), str(row.tokens))
    return table


def _acceptance_table(results: Results) -> Table:
    places = max(len(a.rates) for a in results.acceptance)
    table = _table(
        "Speculative decoding", "prompts", "temperature", "tokens/step", *(f"draft {k}" for k in range(1, places + 1)),
        "steps",
    )  # fmt: skip
    for a in results.acceptance:
        rates = [_pm(rate, 3) for rate in a.rates] + [""] * (places - len(a.rates))
        table.add_row(f"{a.kind} ({a.prompts})", f"{a.temperature:g}", _pm(a.length, 3), *rates, str(a.steps))
    return table


def _calibration_table(results: Results) -> Table:
    assert results.calibration is not None
    c = results.calibration
    title = f"Confidence: expected calibration error of survival (temperatures fitted on {c.fitted_on} other steps)"
    table = _table(title, "draft", "without", "fitted", "as stored", "fitted temperature", "cases")
    for before, after, stored in zip(c.before, c.after, c.stored, strict=True):
        name = "all" if before.place is None else str(before.place + 1)
        temperature = "" if before.place is None else f"{c.temperatures[before.place]:.3f}"
        errors = [_pm(Estimate(r.ece, r.stderr)) for r in (before, after, stored)]
        table.add_row(name, *errors, temperature, str(before.count))
    return table


def _recall_table(context: int, rows: Sequence[Recall]) -> Table:
    title = f"Attention mass on compressed rows that a selection holds, {context} tokens"
    table = _table(title, "layer", "rows", "of", *WAYS, "mass on rows")
    for r in rows:
        shares = [_pm(r.shares[way], 3) for way in WAYS]
        table.add_row(str(r.layer), str(r.chosen), str(r.visible), *shares, f"{r.mass:.3f}")
    return table


def _needle_table(needles: Sequence[Needle]) -> Table:
    depths = list(dict.fromkeys(n.depth for n in needles))
    title = "Retrieval: exact answers of trials (right characters)"
    table = _table(title, "tokens", *(f"depth {d:g}" for d in depths))
    for every_row, tokens in dict.fromkeys((n.every_row, n.tokens) for n in needles):
        own = {n.depth: n for n in needles if (n.every_row, n.tokens) == (every_row, tokens)}
        cells = [f"{n.exact}/{n.trials} ({n.characters:.0%})" for n in (own[d] for d in depths)]
        table.add_row(f"{tokens}{', every row read' if every_row else ''}", *cells)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _pm(estimate: Estimate, digits: int = 4) -> str:
    if math.isnan(estimate.stderr):
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ±{estimate.stderr:.{digits}f}"


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
