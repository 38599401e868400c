"""Looks at a world after every event, and says which invariant does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import Deliver, Report, Send
from orchestrator.simulate.checks.rights import Rights
from orchestrator.simulate.checks.violation import Violation
from orchestrator.simulate.machine import Machine
from orchestrator.simulate.toy.engine import ToyEngine

if TYPE_CHECKING:
    from orchestrator.simulate.park import Park


class Watch:
    """The checks of one run."""

    def __init__(self, world: Park) -> None:
        self._world = world
        self._rights = Rights(self.wrong)
        self.blocks_read = 0

    def wrong(self, invariant: int, what: str) -> None:
        """Raises `Violation`."""
        raise Violation(invariant, what, self._world.queue.now)

    def stepped(self, machine: Machine, event: Any, actions: list[Any]) -> None:
        """A core has handled an event, and all it asked for was done."""
        self._rights.handled(machine, event, actions)
        for action in actions:
            kind = type(action)
            if kind is Send:
                if type(action.message) is Report:
                    self._report(action.message)
                else:
                    self._rights.sends(machine, action)
            elif kind is port.RunDecode:
                self._rights.runs(machine, action)
            elif kind is Deliver:
                self._rights.delivers(machine, action)
        core = machine.core
        if core is None or machine.wake is not None:
            return
        engine = self._world.engines.get(machine.name)
        if (engine is None or not engine.owes) and core.held:
            self.wrong(8, f"{machine.name} holds {sorted(core.held)[:3]} and waits for nothing")
        if engine is not None:
            self.engine(engine)

    def _report(self, report: Report) -> None:
        """Only decode workers count before they are given something; the others may be over by the last they took."""
        least = 0.0 if report.role == "decode" else -report.capacity
        if not least <= report.room <= report.capacity:
            self.wrong(9, f"{report.worker}: room {report.room} of {report.capacity}")

    def engine(self, engine: ToyEngine) -> None:
        """Blocks of an engine add up."""
        cells = getattr(engine, "cells", None)
        if cells is not None and not cells.adds_up:
            self.wrong(4, f"{engine.name}: {cells.pool.counts} of {cells.pool.size - 1} blocks")

    def engine_gone(self, engine: ToyEngine) -> None:
        """An engine's process ended."""
        self.engine(engine)

    def begins_anew(self, name: str) -> None:
        """A machine's process ended; what it knew is gone."""
        self._rights.forget(name)

    def leaves(self, name: str) -> None:
        """A drained worker leaves for good."""
        core, engine = self._world.machines[name].core, self._world.engines[name]
        held = {*getattr(engine, "live", {}), *getattr(core, "jobs", {}), *getattr(core, "rows", {})}
        if held:
            self.wrong(4, f"{name} leaves and holds {sorted(held)[:3]}")

    def block_read(self, engine: str, key: bytes, data: bytes, right: bytes) -> None:
        """A block came out of the shared store."""
        self.blocks_read += 1
        if data != right:
            self.wrong(3, f"{engine}: block {key.hex()[:16]} is not what was stored under its key")

    def store_order(self) -> None:
        """The index holds no child without its parent, and its sizes add up."""
        index, used = self._world.store.index, 0
        for entry in index:
            used += entry.size
            above = entry.parent
            if above is not None and index.get(above.key) is not above:
                self.wrong(5, f"block {entry.key.hex()[:16]} is visible, its parent is not")
        if used != index.used:
            self.wrong(5, f"the index counts {index.used} bytes, its blocks have {used}")

    def is_gone(self, request: str) -> None:
        """A request whose client has left: nobody holds anything of it."""
        stream = self._world.clients.streams.get(request)
        if stream is None or stream.state in ("open", "finished"):
            return
        for name, machine in self._world.machines.items():
            held = machine.core.held if machine.core is not None else frozenset()
            live = getattr(self._world.engines.get(name), "live", {})
            for key in (*held, *live):
                if key[0] == request:
                    self.wrong(
                        4, f"{name} holds {key}, whose client left {self._world.queue.now - stream.ended:.1f} s ago"
                    )

    def is_quiet(self) -> bool:
        """Nobody asks any more, and nobody holds anything."""
        return not self._left_over()

    def not_quiet(self) -> None:
        """Time is over: say what is left."""
        invariant, what = self._left_over()[0]
        self.wrong(invariant, what)

    def _left_over(self) -> list[tuple[int, str]]:
        world, found = self._world, list[tuple[int, str]]()
        clients = world.clients
        if clients.open or clients.coming:
            names = sorted(clients.open)[:5]
            found.append((11, f"{len(clients.open)} streams are open ({', '.join(names)}), {clients.coming} to come"))
        for name, machine in world.machines.items():
            if machine.core is None:
                found.append((11, f"{name} is down"))
            elif machine.core.held:
                found.append((4, f"{name} holds {sorted(machine.core.held)[:3]}"))
        for name, engine in world.engines.items():
            held = getattr(engine, "live", {})
            cells = getattr(engine, "cells", None)
            counts = cells.pool.counts if cells is not None else {"live": 0}
            if held or counts["live"]:
                found.append((4, f"the engine of {name} holds {sorted(held)[:3]}, {counts}"))
        return found

    def totals(self) -> None:
        """Requests add up: every stream has one outcome, and entries counted what clients saw."""
        clients = self._world.clients
        ended = sum(clients.outcomes.values())
        if ended + len(clients.open) != len(clients.streams):
            self.wrong(10, f"{len(clients.streams)} streams, {ended} ended, {len(clients.open)} open")
        counted = sum(stream.got for stream in clients.streams.values())
        if counted != clients.delivered:
            self.wrong(10, f"{counted} tokens in streams, {clients.delivered} delivered")
