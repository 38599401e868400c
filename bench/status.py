"""Which rows of the ledger still speak about the sources as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


def gpus_of(device: str) -> int:
    """How many GPUs a ledger's rows are of, by its name: 2 for "h200x2", 1 for "h200"."""
    found = re.search(r"x(\d+)$", device)
    return int(found[1]) if found else 1


def states_of_ops(digests: Mapping[str, str], rows: Iterable[Row]) -> list[State]:
    """States of rows whose points no bench lists: of several GPUs. An op without a digest is gone."""
    made = []
    for row in rows:
        now = digests.get(row["op"])
        state = ORPHAN if now is None else CURRENT if row["digest"] == now else STALE
        made.append(State(row["op"], row["point"], state, row["date"]))
    return made
