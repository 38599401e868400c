"""Reading the ledger files: one a device, the newest row of a point counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernel_core.bench import read_rows

RESULTS = Path(__file__).resolve().parent / "results"
Row = Mapping[str, Any]


def load(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """Newest rows of each `<device>.jsonl`, by device, sorted by op, point and backend.

    `quality.jsonl` holds no timings and is left to `orchestrator.evaluate.ledger`.
    """
    files = (path for path in sorted(folder.glob("*.jsonl")) if path.stem != "quality")
    return {path.stem: newest(read_rows(path)) for path in files}


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each (op, point, backend)."""
    last = {(str(row["op"]), str(row["point"]), str(row["backend"])): row for row in rows}
    return [last[key] for key in sorted(last, key=_natural)]


def reference_us(row: Row) -> float | None:
    """Median of the reference that ran beside the kernel, or None."""
    return next((peer["median_us"] for peer in row["peers"] if peer["name"] == "reference"), None)


def _natural(key: tuple[str, str, str]) -> tuple[Any, ...]:
    """Order in which b8 stands before b32."""
    parts: list[Any] = []
    for text in key:
        digits = ""
        for char in text + "\0":
            if char.isdigit():
                digits += char
                continue
            if digits:
                parts.append((1, int(digits), ""))
                digits = ""
            parts.append((0, 0, char))
    return tuple(parts)
