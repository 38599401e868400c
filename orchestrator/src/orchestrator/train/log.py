"""The log of a training run: one JSON object a line, and sums on the device between two lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class Means:
    """Means of named scalars over some steps, summed on the device; `take` is the one synchronisation.

    Values that are not finite are left out of the mean; a name without any finite value gives None.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self.steps = 0

    def fits(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether these names can join what was added so far."""
        return self._sums is None or tuple(values) == self._names

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        stacked = torch.stack([value.detach().to(torch.float32).reshape(()) for value in values.values()])
        finite = torch.isfinite(stacked)
        kept = torch.where(finite, stacked, 0.0)
        if self._sums is None or self._counts is None:
            self._names, self._sums, self._counts = tuple(values), kept, finite.to(torch.float32)
        else:
            self._sums += kept
            self._counts += finite
        self.steps += 1

    def take(self) -> dict[str, float | None]:
        """The means so far; begins anew."""
        assert self._sums is not None and self._counts is not None
        sums, counts = torch.stack([self._sums, self._counts]).tolist()
        means = {n: s / c if c else None for n, s, c in zip(self._names, sums, counts, strict=True)}
        self._names, self._sums, self._counts, self.steps = (), None, None, 0
        return means


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Write one line. Numbers are kept to six digits; those that are not finite become null."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: _plain(value) for key, value in line.items()}) + "\n")


def read(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a log; a last one that was cut short is left out."""
    lines = []
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def cut_after(path: Path, step: int) -> None:
    """Drop lines of steps after `step`: they are computed again when a run goes on from an older state."""
    if not path.is_file():
        return
    kept = [line for line in read(path) if line["step"] <= step]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
