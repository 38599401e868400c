"""Ranks whose steps contain collectives have to step together (rule H10).

All ranks agree on step N + 1 at step N: it takes place if any of them has work. A rank without work takes part with an
empty batch, so no collective is ever skipped.
"""

from __future__ import annotations

from typing import Protocol


class Group(Protocol):
    """The ranks of an expert-parallel group."""

    def any(self, mine: bool) -> bool:
        """Whether it is true of any rank. Every rank calls this once a step; it waits for the others."""


class Lockstep:
    """One rank's view. `runs` is what was agreed for the coming step."""

    def __init__(self, group: Group, *, agreed: bool = True) -> None:
        self._group, self._agreed = group, agreed
        self.runs = False

    def agree(self, has_work: bool) -> bool:
        """Fix whether the next step takes place, and return it."""
        self.runs = self._group.any(has_work) if self._agreed else has_work
        return self.runs
