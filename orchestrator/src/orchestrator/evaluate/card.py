"""Figures of the shipped run, kept beside a model, and how a new run compares with them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.evaluate.results import Results

CARD_FILE = "card.json"
ERRORS = 2.0
"""Standard errors of the difference within which two figures count as the same."""


@dataclass(frozen=True)
class Comparison:
    """A figure of the card and of this run. `noise` is what may lie between them by chance."""

    name: str
    unit: str
    card: float
    here: float
    noise: float

    @property
    def difference(self) -> float:
        return self.here - self.card

    @property
    def within(self) -> bool:
        return abs(self.difference) <= self.noise + 1e-9


def read_card(folder: str | Path) -> dict[str, Mapping[str, Any]] | None:
    """Figures by name out of `card.json` (what `as_json` of a run gave); None where the model has none.

    Raises ValueError naming the file if it is damaged.
    """
    path = Path(folder) / CARD_FILE
    if not path.is_file():
        return None
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        return {str(name): {**f, "value": float(f["value"])} for name, f in figures.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read as results of an evaluation ({error!r})") from None


def compare(card: Mapping[str, Mapping[str, Any]], results: Results) -> list[Comparison]:
    """What both have, in this run's order."""
    return [
        Comparison(f.name, f.unit, card[f.name]["value"], f.value, ERRORS * _joined(f.stderr, card[f.name]["stderr"]))
        for f in results.figures()
        if f.name in card
    ]


def _joined(*errors: float | None) -> float:
    return math.sqrt(sum(e * e for e in errors if e is not None and e == e))
