"""Quality figures in the project's ledger: a file of their own beside those of timings, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from orchestrator.evaluate.results import Results

FIELDS = ("point", "model", "value", "unit", "stderr", "samples", "date", "note")


def quality_rows(results: Results, note: str = "") -> list[dict[str, object]]:
    """A row a figure: ``quality_<model>_<figure>``; `model` is the digest of the checkpoint."""
    name = results.model.removeprefix("v41-").replace("-", "_")
    note = note or f"{results.size} sizes"
    return [
        {
            "point": f"quality_{name}_{figure.name}",
            "model": results.sha256,
            "value": figure.value,
            "unit": figure.unit,
            "stderr": _known(figure.stderr),
            "samples": figure.samples,
            "date": results.date,
            "note": note,
        }
        for figure in results.figures()
    ]


def append_quality(path: str | Path, rows: list[dict[str, object]]) -> None:
    """Add rows to the file; it is made where it is missing.

    Raises ValueError, before anything is written, for a row that has not exactly `FIELDS`.
    """
    for row in rows:
        if tuple(row) != FIELDS:
            raise ValueError(f"rows: got fields {list(row)}, allowed are {list(FIELDS)}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def read_quality(path: str | Path) -> dict[str, Mapping[str, object]]:
    """The newest row of each point, by point."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return {row["point"]: row for row in map(json.loads, filter(None, lines))}


def _known(value: float) -> float | None:
    return None if value != value else value
