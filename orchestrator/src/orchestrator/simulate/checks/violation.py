"""The ten invariants by number, and what is raised where one does not hold."""

from __future__ import annotations

INVARIANTS = {
    1: "each accepted request has exactly one outcome, and its stream no gap and no repeat",
    2: "tokens are those of the reference",
    3: "every block that is read is the one that was asked for",
    4: "blocks add up, and nothing is held once all is quiet",
    5: "no block is visible without its parent, nor used later than it",
    6: "ranks of a group agree on step and plan, and no expert is without a copy",
    7: "nobody works who has lost his right to",
    8: "whoever waits has a reason and will be woken",
    9: "no step is above its budget, and no room below zero",
    10: "requests and tokens add up",
    11: "once all is healed, every accepted request ends",
}


class Violation(AssertionError):
    """An invariant does not hold.

    Attributes:
        invariant: its number. what: the case. at: virtual second.
    """

    def __init__(self, invariant: int, what: str, at: float) -> None:
        self.invariant, self.what, self.at = invariant, what, at
        super().__init__(f"invariant {invariant} ({INVARIANTS[invariant]}) at {at:.3f} s: {what}")

    def __reduce__(self) -> tuple[type, tuple[int, str, float]]:
        return Violation, (self.invariant, self.what, self.at)
