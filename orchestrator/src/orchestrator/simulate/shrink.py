"""Makes a failing run small: fewer faults, fewer requests, less time, while the same invariant fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.simulate.run import Result, number_of_arrivals, simulate
from orchestrator.simulate.scenario import Scenario

Progress = Callable[[str], None]


def shrink(result: Result, *, runs: int = 200, progress: Progress = lambda text: None) -> Result:
    """A smaller failing run of the same seed, found by at most `runs` runs.

    Time is cut behind the failure, then faults and arrivals are left out, half of them at once, then a quarter, and so
    on. Raises ValueError for a run that did not fail.
    """
    if result.ok:
        raise ValueError("result: got a run in which everything holds, allowed are failed ones")
    best, left = result, runs

    def still_fails(scenario: Scenario) -> bool:
        nonlocal best, left
        if left <= 0:
            return False
        left -= 1
        found = simulate(scenario)
        if found.invariant == result.invariant:
            best = found
            return True
        return False

    if result.at < result.scenario.seconds:
        still_fails(replace(result.scenario, seconds=result.at + 1.0))
    for name, numbers in (
        ("without", [n for n, fault in best.faults if fault.at <= best.at]),
        ("skipped", list(range(number_of_arrivals(best.scenario)))),
    ):

        def fails_with(keep: Sequence[int], name: str = name, numbers: Sequence[int] = numbers) -> bool:
            return still_fails(_keeping(best.scenario, name, numbers, keep))

        kept = _reduce(numbers, fails_with)
        progress(f"{len(kept)} of {len(numbers)} {'faults' if name == 'without' else 'arrivals'} are needed")
    return best


def _keeping(scenario: Scenario, name: str, numbers: Sequence[int], keep: Sequence[int]) -> Scenario:
    gone = frozenset(numbers) - frozenset(keep)
    if name == "without":
        return replace(scenario, without=scenario.without | gone)
    return replace(scenario, skipped=scenario.skipped | gone)


def _reduce(numbers: Sequence[int], still_fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Delta debugging: the least list found, by leaving out ever smaller parts."""
    kept, parts = list(numbers), 2
    while kept:
        size = max(1, len(kept) // parts)
        cut = False
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if still_fails(rest):
                kept, cut = rest, True
                break
        if not cut:
            if size == 1:
                break
            parts *= 2
        else:
            parts = max(2, parts - 1)
    return kept
