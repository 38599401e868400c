"""One run, and what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from orchestrator.simulate.checks.violation import Violation
from orchestrator.simulate.faults import Fault
from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.trace import Trace
from orchestrator.simulate.world import World


@dataclass(frozen=True)
class Result:
    """Of one run.

    Attributes:
        invariant: number of the one that did not hold, 0 if all did. what: the case. at: virtual second of it.
        seconds: virtual ones until all was quiet. events, steps: of the queue, and of cores.
        requests, tokens: that clients asked for and got. outcomes: streams by how they ended. counts: everything else.
        cpu: seconds of this machine.
    """

    scenario: Scenario
    invariant: int
    what: str
    at: float
    seconds: float
    events: int
    steps: int
    requests: int
    tokens: int
    cpu: float
    outcomes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    faults: tuple[tuple[int, Fault], ...] = ()

    @property
    def ok(self) -> bool:
        return self.invariant == 0

    @property
    def line(self) -> str:
        """One line for a terminal."""
        end = "ok" if self.ok else f"invariant {self.invariant} at {self.at:.3f} s: {self.what}"
        return f"seed {self.scenario.seed}: {end}"


def simulate(
    scenario: Scenario, write: Callable[[str], None] | None = None, only: frozenset[str] = frozenset()
) -> Result:
    """Run a scenario to its end or to the first invariant that does not hold.

    Args:
        write: takes the lines of a trace; None for none. only: requests that the trace is about, empty for all.
    """
    begun = time.process_time()
    trace = None if write is None else Trace(write, only)
    world = World(scenario, trace)
    invariant, what, at = 0, "", 0.0
    try:
        with _dropped_plans_unsaid():
            world.run()
            world.watch.totals()
    except Violation as violation:
        invariant, what, at = violation.invariant, violation.what, violation.at
        if trace is not None:
            trace.note(at, str(violation))
    counts = {**world.counts, "blocks compared": world.watch.blocks_read}
    counts |= {f"messages {name}": count for name, count in world.network.counts.items()}
    counts |= {f"store {name}": count for name, count in world.store.counts.items()}
    counts |= {f"failed: {reason}": count for reason, count in world.clients.failures.items()}
    return Result(
        scenario,
        invariant,
        what,
        at,
        world.queue.now,
        world.queue.done,
        sum(world.steps.values()),
        len(world.clients.streams),
        world.clients.delivered,
        time.process_time() - begun,
        dict(world.clients.outcomes),
        counts,
        tuple(world.faults),
    )


@contextmanager
def _dropped_plans_unsaid() -> Iterator[None]:
    """They are what a run is for; elsewhere they are warned of."""
    logger = logging.getLogger("orchestrator.balance")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def number_of_arrivals(scenario: Scenario) -> int:
    """Arrivals of the whole scenario, whatever it skips."""
    return len(World(replace(scenario, skipped=frozenset(), every=0.0)).workload)
