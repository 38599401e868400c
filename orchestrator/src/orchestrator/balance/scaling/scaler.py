"""From what a role wants to what is started and stopped: bounds, rates, no scale-in while used, no flapping."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_core.check import require


@dataclass(frozen=True)
class ScalePolicy:
    """Attributes:
    least, most: units of the role.
    up: largest growth a period, as a part of what runs, one unit at least. down: units a period.
    keep_above: quota use above which nothing is stopped, and that the survivors must stay below.
    up_periods, down_periods: periods for which the want has to differ first.
    cool: periods after a stop in which nothing more is stopped.
    """

    least: int = 1
    most: int = 64
    up: float = 0.25
    down: int = 1
    keep_above: float = 0.8
    up_periods: int = 2
    down_periods: int = 5
    cool: int = 5

    def __post_init__(self) -> None:
        require(0 <= self.least <= self.most, "least", self.least, f"0 to {self.most}")
        require(self.up > 0, "up", self.up, "above 0")
        require(self.down > 0, "down", self.down, "1 or more")
        require(0 < self.keep_above <= 1, "keep_above", self.keep_above, "above 0, to 1")


@dataclass(frozen=True)
class Change:
    """What is to be done: `start` new units, `cancel` starts that have not come up, `stop` running ones (by drain)."""

    start: int = 0
    cancel: int = 0
    stop: int = 0
    why: str = ""


class Scaler:
    """One a role. `period` is called at fixed intervals.

    Attributes:
        pending: units that were started and are not running yet; they count as capacity.
    """

    def __init__(self, policy: ScalePolicy | None = None) -> None:
        self.policy = policy or ScalePolicy()
        self.pending = 0
        self._above = self._below = self._cooling = 0

    def came_up(self, units: int = 1) -> None:
        self.pending = max(0, self.pending - units)

    def failed_start(self, units: int = 1) -> None:
        self.pending = max(0, self.pending - units)

    def period(self, running: int, want: int | None, use: float | None) -> Change:
        """What to change, given the units that run.

        Args:
            want: of `scaling.want`; None where metrics are missing: hold, but keep `least`.
            use: part of the quota of the running units that is in use, 0 to 1; None where it is missing.
        """
        policy, have = self.policy, running + self.pending
        self._cooling = max(0, self._cooling - 1)
        if have < policy.least:
            return self._start(policy.least - have, "below the least number")
        if want is None or (isinstance(want, float) and math.isnan(want)):
            self._above = self._below = 0
            return Change(why="no metrics: hold")
        want = min(max(want, policy.least), policy.most)
        self._above = self._above + 1 if want > have else 0
        self._below = self._below + 1 if want < have else 0
        if self._above >= policy.up_periods:
            step = max(1, math.floor(running * policy.up))
            return self._start(min(step, want - have), f"{want} wanted, {have} there")
        if self._below < policy.down_periods:
            return Change()
        if self.pending:
            cancel = min(self.pending, have - want)
            self.pending -= cancel
            return Change(cancel=cancel, why=f"{want} wanted, {have} there, not all of them up")
        stop = min(policy.down, running - want)
        if self._cooling or use is None or use > policy.keep_above:
            return Change(why="held: cooling down" if self._cooling else "held: in use")
        if use * running / (running - stop) > policy.keep_above if running > stop else use > 0:
            return Change(why="held: the others could not take it over")
        self._cooling, self._below = policy.cool, 0
        return Change(stop=stop, why=f"{want} wanted, {running} there")

    def _start(self, units: int, why: str) -> Change:
        self.pending += units
        self._above = 0
        return Change(start=units, why=why)


def trade(changes: dict[str, Change], spares: int) -> tuple[list[tuple[str, str]], int]:
    """Machines that change their role, and spare ones to use, before anything is started or stopped.

    Returns ([(from role, to role)], spares used): a role that stops gives to one that starts.
    """
    giving = [role for role, change in changes.items() for _ in range(change.stop)]
    taking = [role for role, change in changes.items() for _ in range(change.start)]
    moves = list(zip(giving, taking, strict=False))
    return moves, min(spares, len(taking) - len(moves))
