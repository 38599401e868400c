"""Broken variants of the protocol: each leaves one rule out, and the checks have to notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from orchestrator.roles.rules import Rules
from orchestrator.simulate.run import Result
from orchestrator.simulate.sweep import Job, sweep

VARIANTS = tuple(field.name for field in fields(Rules))
"""Names of the rules; a variant is the service without one of them."""


@dataclass(frozen=True)
class Catch:
    """Attributes:
    rule: that was left out. seeds: runs until one failed, or all there were. result: the one that failed, or None.
    """

    rule: str
    seeds: int
    result: Result | None


def rules_without(name: str) -> Rules:
    """All rules but one. Raises ValueError for a name that is none of them."""
    if name not in VARIANTS:
        raise ValueError(f"break: got {name!r}, allowed are {', '.join(VARIANTS)}")
    return replace(Rules(), **{name: False})


def hunt(
    rule: str, seeds: Sequence[int], minutes: float, processes: int, seen: Callable[[Result], None] | None = None
) -> Catch:
    """Run a broken variant with one seed after the other until a check notices."""
    rules = rules_without(rule)
    size = max(1, processes)
    for start in range(0, len(seeds), size):
        summary = sweep([Job(seed, minutes, rules) for seed in seeds[start : start + size]], processes, seen)
        if summary.failed:
            first = summary.failed[0]
            return Catch(rule, seeds.index(first.scenario.seed) + 1, first)
    return Catch(rule, len(seeds), None)
