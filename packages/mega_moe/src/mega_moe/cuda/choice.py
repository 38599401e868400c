"""Which expert kernel runs: a table of rows per expert, measured once for a kind of device and kept as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mega_moe.cuda.experts import TILES, token_tile


@dataclass(frozen=True)
class Choice:
    """Token tile and variant of `mega_moe.cuda.experts.experts`, and whether activations are E4M3 (W4A8)."""

    tile: int
    variant: int = 0
    fp8: bool = False


@dataclass(frozen=True)
class Table:
    """Choices by the mean rows of an expert: an entry holds up to its bound, the last one above it too."""

    bounds: Sequence[int]
    exact: Sequence[Choice]  # bfloat16 activations: no bit depends on these
    fast: Sequence[Choice]  # either kind

    def __post_init__(self) -> None:
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"bounds: got {list(self.bounds)}, allowed are ascending ones")
        if {len(self.exact), len(self.fast)} != {len(self.bounds)}:
            raise ValueError("exact, fast: allowed is one choice for each bound")
        for choice in (*self.exact, *self.fast):
            if choice.tile not in TILES or (choice.fp8 and choice.tile != TILES[-1]):
                raise ValueError(f"choice: got {choice}")
        if any(choice.fp8 for choice in self.exact):
            raise ValueError("exact: allowed are bfloat16 activations alone")

    def save(self, path: Path) -> None:
        lines = {
            "bounds": list(self.bounds),
            "exact": [asdict(c) for c in self.exact],
            "fast": [asdict(c) for c in self.fast],
        }
        path.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Table:
        read = json.loads(path.read_text(encoding="utf-8"))
        return Table(read["bounds"], *([Choice(**c) for c in read[kind]] for kind in ("exact", "fast")))


def choose(rows: int, experts: int, table: Table | None, *, reproducible: bool) -> Choice:
    """For `rows` (tokens times slots) over `experts`.

    With `reproducible` the precision of activations does not depend on how many rows there are: bfloat16. Tiles still
    may, since no bit depends on them.
    """
    if table is None:
        return Choice(token_tile(rows, experts))
    mean = -(-rows // max(1, experts))
    at = next((i for i, bound in enumerate(table.bounds) if mean <= bound), len(table.bounds) - 1)
    return (table.exact if reproducible else table.fast)[at]
