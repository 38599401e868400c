"""The regression gate: a new measurement against the newest one of the ledger.

On a CPU the figure that travels between runs is the ratio to the reference, so the old time is first scaled by how
the reference moved. A point fails when it is more than 15 % and at least 3 us slower than that.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench import format
from bench.ledger import Row, reference_us

SLOWER, AT_LEAST_US = 1.15, 3.0


def regressions(new: Iterable[Row], old: Iterable[Row]) -> list[str]:
    """A sentence for every row that fails. Rows with other threads or instruction set are not compared."""
    before = {_key(row): row for row in old}
    found = []
    for row in new:
        past = before.get(_key(row))
        if past is None:
            continue
        now_reference, past_reference = reference_us(row), reference_us(past)
        scale = now_reference / past_reference if now_reference and past_reference else 1.0
        expected, median = past["median_us"] * scale, row["median_us"]
        if median > expected * SLOWER and median - expected >= AT_LEAST_US:
            found.append(
                f"{row['op']} {row['point']}: {format.duration(median)}, expected {format.duration(expected)} "
                f"({format.ratio(median / expected)} slower than on {past['date']})"
            )
    return found


def _key(row: Row) -> tuple[object, ...]:
    versions = row["versions"]
    return row["op"], row["point"], row["backend"], versions.get("isa"), versions.get("threads")
