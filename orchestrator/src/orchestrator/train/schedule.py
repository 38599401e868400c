"""How the learning rate and the phases go with progress: pure functions of the share of steps done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasUntil(Protocol):
    """A phase that ends when the share `until` of all steps is done."""

    @property
    def until(self) -> float: ...


P = TypeVar("P", bound=HasUntil)


def learning_rate(
    progress: float, steps: int, warmup: int = 100, decay_from: float = 0.5, floor: float = 0.03
) -> float:
    """Factor of the peak rate at `progress` (steps done / `steps`): linear up, constant, linear down to `floor`.

    The warm-up takes `warmup` steps, but no more than a tenth of all, and its first step is not zero.
    """
    warmup = min(warmup, steps // 10)
    step = progress * steps
    if step + 1 <= warmup:
        return (step + 1) / (warmup + 1)
    if progress <= decay_from:
        return 1.0
    share = min((progress - decay_from) / (1 - decay_from), 1.0)
    return 1 + share * (floor - 1)


def phase_at(phases: Sequence[P], progress: float) -> P:
    """The phase that a step at `progress` in [0, 1] belongs to. Raises `ValueError` unless they end at 1 in order."""
    ends = [phase.until for phase in phases]
    if not ends or ends != sorted(ends) or ends[-1] != 1.0:
        raise ValueError(f"phases: got ends {ends}, allowed are ascending shares, the last one 1.0")
    return next((phase for phase in phases if progress < phase.until), phases[-1])
