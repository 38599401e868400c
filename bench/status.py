"""Which rows of the ledger still speak about the sources as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.discover import Found
from bench.ledger import Row

CURRENT, STALE, ORPHAN, MISSING = "current", "stale", "orphan", "missing"


@dataclass(frozen=True)
class State:
    """A point and what is known about it.

    current: digest is that of the sources; stale: the sources changed; orphan: no bench has this point any more;
    missing: a bench without a row.
    """

    op: str
    point: str
    state: str
    date: str


def states(found: Found, rows: Iterable[Row], *, missing: bool = True) -> list[State]:
    """One state for every newest row, in ledger order, and with `missing` for every case without a row."""
    digests = {entry.bench.op: entry.digest() for entry in found.entries}
    points = {(entry.bench.op, case.point) for entry, case in found.cases()}
    result = []
    for row in rows:
        key = (row["op"], row["point"])
        if key not in points:
            state = ORPHAN
        else:
            state = CURRENT if row["digest"] == digests[row["op"]] else STALE
        points.discard(key)
        result.append(State(row["op"], row["point"], state, row["date"]))
    return result + [State(op, point, MISSING, "") for op, point in sorted(points) if missing]
