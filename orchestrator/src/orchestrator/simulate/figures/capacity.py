"""What a number of tokens a day needs, by arithmetic; every line says what it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_core.check import require
from orchestrator.simulate.figures import published as p

DAY = 86_400.0


@dataclass(frozen=True)
class Traffic:
    """What a mean request is.

    Attributes:
        name: whose. input, missed, output: tokens. retention: seconds for which what was computed is stored; output is
            stored as well.
    """

    name: str
    input: float
    missed: float
    output: float
    retention: float = p.RETENTION.value * 3600

    def __post_init__(self) -> None:
        require(0 < self.missed <= self.input, "missed", self.missed, f"above 0, to {self.input}")
        require(self.output > 0, "output", self.output, "above 0")
        require(self.retention > 0, "retention", self.retention, "above 0, seconds")


@dataclass(frozen=True)
class Rates:
    """What a GPU does a second.

    Attributes:
        missed: tokens computed in prefill. output: tokens of decode. peak: over the day's mean. unit: GPUs of the
            smallest efficient group of each role.
    """

    missed: float = p.PREFILL_MISSED.value
    output: float = p.DECODE_RATE.value
    peak: float = 1.0
    unit: int = 64

    def __post_init__(self) -> None:
        for name in ("missed", "output", "unit"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        require(self.peak >= 1, "peak", self.peak, "1 or more, times the mean")


@dataclass(frozen=True)
class Line:
    """A result, and how: its arithmetic and assumptions, in words."""

    what: str
    value: float
    unit: str
    how: str


def needs(daily: float, traffic: Traffic, rates: Rates) -> list[Line]:
    """What `daily` tokens need. Tokens are input, hits too, and output."""
    require(daily > 0, "daily", daily, "above 0, tokens")
    requests = daily / DAY / (traffic.input + traffic.output)
    top = requests * rates.peak
    missed, output = top * traffic.missed, top * traffic.output
    hits = top * (traffic.input - traffic.missed)
    prefill, decode = missed / rates.missed, output / rates.output
    size = p.TOKEN_BYTES.value
    kept = requests * (traffic.missed + traffic.output) * traffic.retention * size
    reads, space = hits * size * p.READ_AHEAD.value, kept * p.STRIPE.value
    by_read, by_space = reads / p.NODE_READ.value, space / (0.85 * p.NODE_SPACE.value)
    moved = top * (traffic.input * size + p.WINDOW_BYTES.value)
    hosts = max(1, math.ceil(prefill / p.NODE_GPUS.value))
    tokens, stored = traffic.input + traffic.output, traffic.missed + traffic.output
    hours, code = traffic.retention / 3600, f"x {p.STRIPE.value}"
    groups = f"in groups of {rates.unit}"
    rows: list[tuple[str, float, str, str]] = [
        ("requests a second, mean", requests, "1/s", f"{daily:.3g} tokens a day, {tokens:,.0f} a request"),
        (
            "prefill GPUs",
            _whole(prefill, rates.unit),
            "GPUs",
            f"{missed:.3g} missed/s, {rates.missed:,.0f} each, {groups}",
        ),
        (
            "decode GPUs",
            _whole(decode, rates.unit),
            "GPUs",
            f"{output:.3g} output/s, {rates.output:,.0f} each, {groups}",
        ),
        ("prefill to decode", prefill / decode, "-", "GPUs, before rounding to groups"),
        (
            "stored, logical",
            kept / 1e15,
            "PB",
            f"missed and output tokens of {hours:.0f} h at the mean, {size:.0f} B each",
        ),
        ("stored, with erasure code", space / 1e15, "PB", code),
        ("written", requests * stored * size * p.STRIPE.value / 1e9, "GB/s", f"mean, with erasure code {code}"),
        ("read from the store", reads / 1e12, "TB/s", f"hits, {size:.0f} B each, 11 shards asked for 10"),
        ("storage nodes for space", math.ceil(by_space), "nodes", "85 % of 16 disks of 14 TiB"),
        ("storage nodes for reads", math.ceil(by_read), "nodes", "6.6 TiB/s of 180 nodes, published for 3FS"),
        ("store to a prefill host", hits * size / hosts * 8 / 1e9, "Gb/s", "hits, over hosts of 8 GPUs"),
        ("prefill to decode, a host", moved / hosts * 8 / 1e9, "Gb/s", "whole prompts and their windows"),
        ("prefill to decode, in sum", moved / 1e12, "TB/s", "the same"),
    ]
    return [Line(*row) for row in rows]


def _whole(gpus: float, unit: int) -> int:
    return math.ceil(gpus / unit - 1e-9) * unit
