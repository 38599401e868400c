"""Every kind of fault in every phase of a request: is anything lost or repeated, and how long until all goes on."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.roles.settings import Settings
from orchestrator.simulate.checks.violation import Violation
from orchestrator.simulate.clients import MAY_FAIL
from orchestrator.simulate.faults import MENU, Fault, find
from orchestrator.simulate.phases import PHASES, phase_of
from orchestrator.simulate.scenario import Scenario, Shape
from orchestrator.simulate.streams import Streams
from orchestrator.simulate.toy.engine import EngineShape
from orchestrator.simulate.workload import Asked, Mix
from orchestrator.simulate.world import World

__all__ = ["PHASES", "Cell", "Found", "as_dict", "cells", "run_cell", "run_cells"]

_LOOK = 0.002
"""Virtual seconds between two looks at the probe."""
_PROBE = "probe"
_ASKED_AT = 10.0
_FAULT_S = 6.0


@dataclass(frozen=True)
class Cell:
    """One run: a fault of a kind strikes while the probe is in a phase."""

    fault: str
    phase: str
    seed: int


@dataclass(frozen=True)
class Found:
    """What came of a cell.

    Attributes:
        struck: whether the probe was ever in the phase. at: second of the fault. lost: accepted requests that never
        ended or failed. repeated: tokens that came twice, or wrong. what: the invariant that did not hold.
        recover: seconds from the fault until every stream that was open then had its next token or its end.
        slower: seconds that the probe's whole answer took longer than in the same run without the fault.
    """

    cell: Cell
    struck: bool
    at: float = 0.0
    lost: int = 0
    repeated: int = 0
    what: str = ""
    recover: float = 0.0
    slower: float = 0.0

    @property
    def ok(self) -> bool:
        """As `Result.ok`."""
        return not (self.lost or self.repeated or self.what)


def cells(kinds: Sequence[str] | None, seeds: Iterable[int]) -> list[Cell]:
    """All runs of a matrix. Raises ValueError for a kind that is not on the menu."""
    names = list(MENU) if kinds is None else [find(name).name for name in kinds]
    return [Cell(name, phase, seed) for name in names for phase in PHASES for seed in seeds]


def _scenario(cell: Cell) -> Scenario:
    """A small service under light load; nothing goes wrong but what the cell brings."""
    engine = EngineShape(blocks=160, ranks=4, fewest=2, drafts=1, row=0.01, launch=0.05, token=1e-3)
    shape = Shape(entries=2, encoders=2, prefills=2, decodes=3, prefill=engine, decode=engine)
    return Scenario(
        cell.seed,
        seconds=_ASKED_AT + 45.0,
        shape=shape,
        mix=Mix(rate=0.8, calm=20.0, leave=0.0, twice=0.0, huge=0.0, image=0.3, largest=shape.decode.blocks * 100),
        settings=Settings(grace=2.0),
        every=0.0,
    )


class _Probe:
    """Puts one request into a world and a fault where it stands."""

    def __init__(self, cell: Cell, *, strike: bool) -> None:
        self.cell, self.strike = cell, strike
        self.world = World(_scenario(cell))
        self.struck_at: float | None = None
        self.waits: dict[str, int] = {}
        self.recovered: float | None = None
        random = Streams(cell.seed)("probe")
        prompt = tuple(random.randrange(2, 50_000) for _ in range(700))
        images = ((600, 600),) if cell.phase == "encoding" else ()
        self.asked = Asked(_ASKED_AT, _PROBE, "tenant0", prompt, images, seed=7, grammar="json", most=60)
        self.random = random
        world = self.world
        world.queue.at(_ASKED_AT, world.clients.ask, self.asked)
        if cell.phase == "queued":
            self._fill_up()
        world.queue.at(_ASKED_AT + _LOOK / 4, self._look)

    def _fill_up(self) -> None:
        """So many prompts come just before that the probe has to wait."""
        for n in range(12):
            prompt = tuple(self.random.randrange(2, 50_000) for _ in range(700))
            asked = replace(self.asked, at=_ASKED_AT - 0.05, request=f"before{n}", prompt=prompt, most=10)
            self.world.queue.at(asked.at, self.world.clients.ask, asked)

    def _look(self) -> None:
        world = self.world
        if self.struck_at is None:
            found = phase_of(world, _PROBE)
            if found is not None and found[0] == "decoding" and self.cell.phase == "migrating":
                world.drain(found[1], 0.0)
            elif found is not None and found[0] == self.cell.phase:
                self._hit(found[1])
            elif _PROBE not in world.clients.open:
                return
        else:
            self._see()
            if self.recovered is not None:
                return
        world.queue.after(_LOOK, self._look)

    def _hit(self, machine: str) -> None:
        world = self.world
        self.struck_at = world.queue.now
        self.waits = {name: stream.got for name, stream in world.clients.open.items()}
        if self.strike:
            world.plan(_aimed(world, self.cell, machine, self.struck_at, self.random))
        self._see()

    def _see(self) -> None:
        """Streams that were open at the fault, and have had neither a token nor their end since."""
        clients = self.world.clients
        for name, got in list(self.waits.items()):
            stream = clients.streams[name]
            if stream.got > got or stream.state not in ("open", "left"):
                if stream.state == "broken":  # its client has come again: that one counts now
                    again = f"{stream.asked.request}~{stream.tries + 1}"
                    if again not in clients.streams:
                        continue
                    self.waits[again] = 0
                del self.waits[name]
        if not self.waits and self.recovered is None:
            assert self.struck_at is not None
            self.recovered = self.world.queue.now - self.struck_at

    def run(self) -> str:
        """Returns what did not hold, empty if all did."""
        try:
            self.world.run()
            self.world.watch.totals()
        except Violation as violation:
            return str(violation)
        return ""

    def took(self) -> float:
        """Seconds of the probe's whole answer, over all its connections."""
        streams = [s for s in self.world.clients.streams.values() if s.asked.request == _PROBE]
        return max((s.ended for s in streams), default=0.0) - _ASKED_AT


def _aimed(world: World, cell: Cell, machine: str, at: float, random: Any) -> Fault:
    """A fault of the kind, at the machine that has the probe or at a link of it."""
    kind = find(cell.fault)
    fault = kind.draw(world, random, at)
    for _ in range(50):
        if fault is not None:
            break
        fault = kind.draw(world, random, at)
    assert fault is not None
    targets = fault.targets
    if len(targets) == 2 and all(target in world.machines for target in targets):
        other = world.settings.router if machine != world.settings.router else sorted(world.engines)[0]
        targets = (machine, other) if random.random() < 0.5 else (other, machine)
    elif len(targets) == 1 and targets[0] in world.machines:
        targets = (machine if _fits(world, fault, machine) else targets[0],)
    return replace(
        fault, seconds=min(fault.seconds, _FAULT_S) and max(1.0, min(fault.seconds, _FAULT_S)), targets=targets
    )


def _fits(world: World, fault: Fault, machine: str) -> bool:
    """Whether a kind that strikes engines could strike this machine."""
    roles = getattr(find(fault.kind), "roles", ())
    workers = ("encoder", "prefill", "decode")
    if fault.kind in ("drain", "lease_loss"):
        roles = workers
    return not roles or world.role_of(machine) in roles


def run_cell(cell: Cell) -> Found:
    """Run a cell with its fault, and once without for comparison."""
    probe = _Probe(cell, strike=True)
    what = probe.run()
    if probe.struck_at is None and not what:
        return Found(cell, struck=False)
    calm = _Probe(cell, strike=False)
    calm.run()
    clients = probe.world.clients
    lost = len(clients.open) + sum(n for why, n in clients.failures.items() if not why.startswith(MAY_FAIL))
    repeated = int(what.startswith(("invariant 1 ", "invariant 2 ")))
    recover = probe.recovered if probe.recovered is not None else probe.world.queue.now - (probe.struck_at or 0.0)
    return Found(
        cell, True, probe.struck_at or 0.0, lost, repeated, what, recover, max(0.0, probe.took() - calm.took())
    )


def run_cells(wanted: Sequence[Cell], processes: int, seen: Callable[[Any], None] | None = None) -> list[Found]:
    """All cells, in their order."""
    found = []
    if processes == 1:
        for cell in wanted:
            found.append(run_cell(cell))
            if seen is not None:
                seen(found[-1])
        return found
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for result in pool.map(run_cell, wanted, chunksize=8):
            found.append(result)
            if seen is not None:
                seen(result)
    return found


def as_dict(found: Sequence[Found]) -> dict[str, Any]:
    """The matrix as it is written to a file.

    `cells` has one object for each fault and phase: runs in which the phase was met, requests lost, tokens repeated,
    invariants that failed, and seconds to recover and seconds the probe took longer, as least, median and most.
    """
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        groups.setdefault((one.cell.fault, one.cell.phase), []).append(one)
    table: list[dict[str, Any]] = []
    for (fault, phase), group in groups.items():
        struck = [one for one in group if one.struck]
        table.append(
            {
                "fault": fault,
                "phase": phase,
                "runs": len(struck),
                "lost": sum(one.lost for one in struck),
                "repeated": sum(one.repeated for one in struck),
                "failed": sorted({one.what for one in struck if one.what}),
                "recover_s": _spread([one.recover for one in struck]),
                "slower_s": _spread([one.slower for one in struck]),
            }
        )
    return {
        "phases": list(PHASES),
        "runs": sum(cell["runs"] for cell in table),
        "lost": sum(cell["lost"] for cell in table),
        "repeated": sum(cell["repeated"] for cell in table),
        "failed": sum(len(cell["failed"]) for cell in table),
        "cells": table,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"least": 0.0, "median": 0.0, "most": 0.0}
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}
