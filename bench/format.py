"""Numbers for people: three digits and a unit."""

from __future__ import annotations

from collections.abc import Mapping

UNKNOWN = "-"


def duration(us: float | None) -> str:
    """Microseconds as us, ms or s."""
    if us is None:
        return UNKNOWN
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{_three(us / size)} {unit}"
    return f"{_three(us)} us"


def span(low: float, high: float) -> str:
    """Two times in microseconds in the unit of the larger: `0.96 - 1.26 ms`."""
    factor, unit = next(((f, u) for f, u in ((1e6, "s"), (1e3, "ms")) if high >= f), (1.0, "us"))
    return f"{_three(low / factor)} - {_three(high / factor)} {unit}"


def size(count: int | None) -> str:
    """Bytes as B, kB, MB or GB (powers of 1000)."""
    if count is None:
        return UNKNOWN
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{_three(count / factor)} {unit}"
    return f"{count} B"


def ratio(value: float | None) -> str:
    """A factor, as in 4.2x."""
    return UNKNOWN if value is None else f"{_three(value)}x"


def percent(value: float | None) -> str:
    """A fraction in percent."""
    return UNKNOWN if value is None else f"{_three(100 * value)} %"


def shape(values: Mapping[str, object]) -> str:
    """`rows=4096 width=512`"""
    return " ".join(f"{name}={value}" for name, value in values.items()) or UNKNOWN


def _three(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
