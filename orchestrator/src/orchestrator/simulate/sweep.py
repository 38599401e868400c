"""Many seeds, over several processes."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from orchestrator.roles.rules import Rules
from orchestrator.simulate.run import Result, simulate
from orchestrator.simulate.scenario import draw


@dataclass(frozen=True)
class Job:
    """One seed of a sweep."""

    seed: int
    minutes: float
    rules: Rules = field(default_factory=Rules)
    kinds: tuple[str, ...] | None = None


@dataclass
class Summary:
    """Of many runs.

    Attributes:
        failed: runs in which something did not hold. seconds: virtual ones. cpu: seconds of this machine.
    """

    runs: int = 0
    seconds: float = 0.0
    events: int = 0
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    cpu: float = 0.0
    failed: list[Result] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.runs += 1
        self.seconds += result.seconds
        self.events += result.events
        self.steps += result.steps
        self.requests += result.requests
        self.tokens += result.tokens
        self.cpu += result.cpu
        self.outcomes.update(result.outcomes)
        self.counts.update(result.counts)
        if not result.ok:
            self.failed.append(result)

    @property
    def faults(self) -> dict[str, int]:
        """Faults that struck, by kind."""
        return {name[6:]: count for name, count in sorted(self.counts.items()) if name.startswith("fault ")}


def run_job(job: Job) -> Result:
    """One seed, in this process."""
    return simulate(draw(job.seed, job.minutes, rules=job.rules, kinds=job.kinds))


def sweep(
    jobs: Sequence[Job], processes: int, seen: Callable[[Result], None] | None = None, *, stop_at_failure: bool = False
) -> Summary:
    """Run all jobs; results are told to `seen` as they come. Raises ValueError for fewer than one process."""
    if processes < 1:
        raise ValueError(f"processes: got {processes}, allowed are 1 or more")
    summary = Summary()
    for result in _results(jobs, processes):
        summary.add(result)
        if seen is not None:
            seen(result)
        if stop_at_failure and not result.ok:
            break
    summary.failed.sort(key=lambda result: result.scenario.seed)
    return summary


def _results(jobs: Sequence[Job], processes: int) -> Iterable[Result]:
    if processes == 1 or len(jobs) < 2:
        yield from map(run_job, jobs)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy whatever threads the caller has
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [pool.submit(run_job, job) for job in jobs]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            for future in waiting:
                future.cancel()
