"""A whole service in one process and no time: a park of machines, clients, faults, and the course of a run."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.simulate.checks.violation import Violation
from orchestrator.simulate.faults import Fault, find, schedule
from orchestrator.simulate.park import Park
from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.trace import Trace
from orchestrator.simulate.workload import Asked, make

_PROBES, _PROBES_S = 6, 12.0
"""Requests asked for after healing, and seconds in which they are asked for and some of them left."""
_GONE_S = 3.0
"""Seconds after a client has left when nobody may hold anything of its request; less than every lease."""


class World(Park):
    """One run in the making. `run` drives it; faults and tests reach into it by its attributes.

    Attributes:
        workload, faults: what comes; faults with their numbers.
    """

    def __init__(self, scenario: Scenario, trace: Trace | None = None) -> None:
        super().__init__(scenario, trace)
        self.workload = self._workload()
        self.faults = self._schedule()

    # What a run is given

    def _workload(self) -> list[Asked]:
        made = make(self.scenario.mix, self.scenario.seconds, self.streams("workload"))
        kept = [asked for n, asked in enumerate(made) if n not in self.scenario.skipped]
        for asked in kept:
            self.queue.at(asked.at, self.clients.ask, asked)
        return kept

    def _schedule(self) -> list[tuple[int, Fault]]:
        scenario = self.scenario
        if not scenario.every:
            return []
        made = schedule(self, self.streams("faults"), 5.0, scenario.seconds, scenario.every, scenario.kinds)
        kept = [(n, fault) for n, fault in enumerate(made) if n not in scenario.without]
        for _, fault in kept:
            self.plan(fault)
        return kept

    def plan(self, fault: Fault) -> None:
        """Have a fault begin, and end, in its time."""
        self.queue.at(fault.at, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        if self.calm:
            return
        targets = tuple(self._present(target) for target in fault.targets)
        if len(set(targets)) < len(targets) or any(self._left(target) for target in targets):
            return  # a link of a machine to itself, or nobody of that role is there
        fault = replace(fault, targets=targets)
        self.counts[f"fault {fault.kind}"] += 1
        if self.trace is not None:
            self.trace.fault(self.queue.now, fault, begins=True)
        find(fault.kind).begin(self, fault)
        if fault.seconds:
            self.queue.after(fault.seconds, self._repair, fault)

    def _repair(self, fault: Fault) -> None:
        if self.calm:
            return
        if self.trace is not None:
            self.trace.fault(self.queue.now, fault, begins=False)
        find(fault.kind).end(self, fault)

    def _left(self, target: str) -> bool:
        return target in self.all_machines and target not in self.machines

    def _present(self, target: str) -> str:
        """A machine that has left is stood in for by the one of its role that came last."""
        if target in self.machines or target not in self.all_machines:
            return target
        same = [name for name in self.machines if self.role_of(name) == self.role_of(target)]
        return same[-1] if same else target

    # The course of a run

    def run(self) -> None:
        """Chaos, then calm. Raises `Violation` as soon as something does not hold."""
        scenario = self.scenario
        self.queue.at(2.0, self._collect)
        self._until(scenario.seconds)
        self.heal()
        self._ask_probes()
        self._until(self.queue.now + _PROBES_S)
        self._until_quiet(scenario.seconds + scenario.settle)

    def _until(self, end: float) -> None:
        queue = self.queue
        step = queue.step
        try:
            while (time := queue.next_time) is not None and time <= end:
                step()
        except Violation:
            raise
        except Exception as error:
            raise Violation(8, f"{type(error).__name__}: {error}", queue.now) from error
        queue.now = max(queue.now, end)

    def _until_quiet(self, end: float) -> None:
        while self.queue.now < end:
            self._until(min(end, self.queue.now + 5.0))
            if self.watch.is_quiet():
                return
        self.watch.not_quiet()

    def _ask_probes(self) -> None:
        """Some more requests once all is healed. Half of them are left, and have to be gone everywhere soon after."""
        random = self.streams("probes")
        now = self.queue.now
        for n in range(_PROBES):
            left = random.random() * 4 if n % 2 else None
            prompt = tuple(random.randrange(2, 50_000) for _ in range(random.randint(1, 500)))
            probe = Asked(now + 4 * random.random(), f"probe{n}", "prober", prompt, most=30, leaves=left)
            self.queue.at(probe.at, self.clients.ask, probe)
            if left is not None:
                self.queue.at(probe.at + left + _GONE_S, self.watch.is_gone, probe.request)

    def _collect(self) -> None:
        self.store.collect(self.queue.now)
        self.watch.store_order()
        self.queue.after(2.0, self._collect)
