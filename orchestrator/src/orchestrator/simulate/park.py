"""The machines of a simulated service: they are added, they crash, come back, drain, and do what their cores ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.roles import engine_port as port
from orchestrator.roles import messages as m
from orchestrator.simulate.checks.watch import Watch
from orchestrator.simulate.clients import Clients
from orchestrator.simulate.machine import Core, Machine
from orchestrator.simulate.network import Network
from orchestrator.simulate.parties import make_core, make_engine
from orchestrator.simulate.queue import EventQueue
from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.store import SharedStore, make_disks
from orchestrator.simulate.streams import Streams
from orchestrator.simulate.toy.cells import BLOCK_BYTES
from orchestrator.simulate.toy.engine import Site, ToyEngine
from orchestrator.simulate.trace import Trace

_POLICY = RetentionPolicy(ttl={Retention.AGENT: 120.0, Retention.CHAT: 240.0}, grace_s=12.0)


class Park:
    """Attributes:
    machines: that take part, by name; one that left for good is not among them. all_machines: that ever did.
    engines: of workers that are up. draining: workers that are told to leave, with the grace. calm: whether all is
    healed, and nothing may go wrong any more.
    """

    def __init__(self, scenario: Scenario, trace: Trace | None = None) -> None:
        self.scenario, self.settings, self.trace = scenario, scenario.settings, trace
        self.streams = Streams(scenario.seed)
        self.queue = EventQueue(self.streams("ties"))
        self.network = Network(self.queue, self.streams("network"), self._arrive, scenario.shape.link)
        shape = scenario.shape
        self.store = SharedStore(
            make_disks(shape.disks, self.streams("disks")), BLOCK_BYTES, shape.store_blocks * BLOCK_BYTES, _POLICY
        )
        self.machines: dict[str, Machine] = {}
        self.all_machines: list[str] = []
        self.engines: dict[str, ToyEngine] = {}
        self.counts: Counter[str] = Counter()
        self._roles: dict[str, str] = {}
        self._settings_of: dict[str, Any] = {}
        self._down: Counter[str] = Counter()
        self.draining: dict[str, float] = {}
        self._numbers: Counter[str] = Counter()
        self._to_replace: set[str] = set()
        self._starting: dict[int, m.Role] = {}
        self._starts = 0
        self.calm = False
        self.watch = Watch(self)
        self.clients = Clients(self.queue, self.streams("clients"), self, self.store, self.watch.wrong)
        self._site = Site(self.queue, self.store, self.watch, self.streams("engines"))
        self._perform: dict[type, Callable[[Machine, Any], None]] = {
            m.Deliver: self._to_client,
            m.DeliverReady: self._to_client,
            m.DeliverEnd: self._to_client,
            m.Exit: self._exit,
            m.StartWorker: self._start_worker,
            m.CancelStart: self._cancel_start,
        }
        self.add("router", scenario.settings.router)
        self.add("scaler", scenario.settings.scaler)
        for role, count in (
            ("entry", shape.entries),
            ("encoder", shape.encoders),
            ("prefill", shape.prefills),
            ("decode", shape.decodes),
        ):
            for _ in range(count):
                self.add(role)

    # Machines

    def role_of(self, name: str) -> str:
        return self._roles[name]

    def add(self, role: str, name: str | None = None) -> str:
        """Start a machine of a role; returns its name."""
        if name is None:
            name = f"{role}-{self._numbers[role]}"
            self._numbers[role] += 1
        self._roles[name] = role
        self.all_machines.append(name)
        make: Callable[[int], Core] = lambda incarnation: self._make(name, incarnation)  # noqa: E731
        clock = self.streams("clocks").random() * 1e5
        machine = Machine(name, self.queue, self.network, make, self.perform, clock=clock)
        machine.watch = self.watch.stepped
        self.machines[name] = machine
        machine.start()
        return name

    def _make(self, name: str, incarnation: int) -> Core:
        role = self._roles[name]
        settings = self._settings_of.get(name, self.settings)
        old = self.engines.pop(name, None)
        if old is not None:
            old.stop()
        engine = make_engine(role, name, self.scenario.shape, self._site, self._emitter(name, incarnation))
        if engine is not None:
            self.engines[name] = engine
        return make_core(role, name, incarnation, settings, self.scenario.rules, self.scenario.shape)

    def _emitter(self, name: str, incarnation: int) -> Callable[[Any], None]:
        def emit(event: Any) -> None:
            machine = self.machines.get(name)
            if machine is not None and machine.incarnation == incarnation:
                machine.handle(event)

        return emit

    def crash(self, name: str, *, lose_disk: bool = False) -> None:
        """End a machine's process. It comes back by as many calls of `restart`."""
        machine = self.machines.get(name)
        if machine is None or self.calm:
            return
        self._down[name] += 1
        self._kill(name)

    def _kill(self, name: str) -> None:
        machine = self.machines[name]
        machine.crash()
        self.watch.begins_anew(name)
        engine = self.engines.pop(name, None)
        if engine is not None:
            engine.stop()
            self.watch.engine_gone(engine)
            self.store.leases.drop_holder(name)
        if self._roles[name] == "entry":
            self.clients.broken(name)

    def restart(self, name: str) -> None:
        self._down[name] -= 1
        if self._down[name] <= 0:
            del self._down[name]
            if name in self.machines:
                self.machines[name].start()

    def kill_rank(self, name: str) -> None:
        """The first rank of a worker's group that lives dies."""
        engine = self.engines.get(name)
        if engine is not None and engine.ranks and not self.calm:
            engine.kill_rank(min(engine.ranks))

    def replace_ranks(self, name: str) -> None:
        """All ranks are there again; the worker's process begins anew with them."""
        engine = self.engines.get(name)
        if engine is not None and len(engine.ranks) < engine.shape.ranks:
            self._kill(name)
            self.queue.after(0.5, self._start_again, name)

    def _start_again(self, name: str) -> None:
        if name in self.machines and not self._down[name]:
            self.machines[name].start()

    def change_settings(self, name: str, amount: float) -> None:
        """From its next start on a party has other times: those of the run times 0.75 to 1.5."""
        factor = 0.75 + 0.75 * amount
        base = self.scenario.settings
        self._settings_of[name] = replace(
            base,
            resend=base.resend * factor,
            lease=max(2.1 * base.beat, base.lease * factor),
            tombstone=base.tombstone * max(1.0, factor),
            grace=base.grace * factor,
        )

    def drain(self, name: str, grace: float) -> None:
        """Tell a worker to leave, once a second until it has."""
        if name in self.machines and name not in self.draining and not self.calm:
            self.draining[name] = grace
            self._to_replace.add(name)
            self._send_drain(name)

    def stop_drain(self, name: str) -> None:
        """Nobody repeats the order; a worker that has not heard it stays."""
        self.draining.pop(name, None)

    def _send_drain(self, name: str) -> None:
        machine = self.machines.get(name)
        if machine is None or name not in self.draining:
            return
        grace = self.draining[name]
        incarnation = getattr(machine.core, "incarnation", 0)
        self.network.send(self.settings.scaler, name, m.Drain(name, incarnation, grace))
        self.queue.after(1.0, self._send_drain, name)

    @property
    def steps(self) -> dict[str, int]:
        """Events that cores of machines that take part have handled."""
        return {name: machine.steps for name, machine in self.machines.items()}

    # What cores ask for

    def perform(self, machine: Machine, action: Any) -> None:
        how = self._perform.get(type(action))
        if how is not None:
            how(machine, action)
            return
        engine = self.engines.get(machine.name)
        if engine is None or not port.is_command(action):
            self.watch.wrong(8, f"{machine.name} asks for {type(action).__name__}, which nobody performs")
            return
        engine.do(action)
        if engine.running and not isinstance(action, port.Expect | port.Withdraw):  # they ask a step for nothing
            self.queue.after(self.scenario.shape.watchdog * max(1.0, engine.speed), self._bark, engine, engine.launches)

    def _bark(self, engine: ToyEngine, launches: int) -> None:
        """A step that is still under way is a process that hangs: end it, and start another."""
        if engine.dead or not engine.running or engine.launches != launches:
            return
        name = engine.name
        self.counts["watchdog"] += 1
        self._kill(name)
        self.queue.after(1.0, self._start_again, name)

    def _to_client(self, machine: Machine, action: Any) -> None:
        self.clients.on[type(action)](machine.name, action)

    def _exit(self, machine: Machine, action: m.Exit) -> None:
        """A drained worker leaves for good. Another one of its role comes where the scaler did not want fewer."""
        name = machine.name
        self.watch.leaves(name)
        engine = self.engines[name]
        replaced = name in self._to_replace or len(engine.ranks) < engine.shape.fewest
        self.counts["replaced" if replaced else "scaled down"] += 1
        self._kill(name)
        self.draining.pop(name, None)
        del self.machines[name]
        if replaced:
            self.queue.after(0.5, self._replace, self._roles[name])

    def _replace(self, role: str) -> None:
        self.add(role)

    def _start_worker(self, machine: Machine, action: m.StartWorker) -> None:
        self.counts["scaled up"] += 1
        self._starts += 1
        self._starting[self._starts] = action.role
        self.queue.after(1.0 if action.spare else 6.0, self._came_up, machine, self._starts)

    def _came_up(self, scaler: Machine, number: int) -> None:
        role = self._starting.pop(number, None)
        if role is not None:
            self.add(role)
            scaler.handle(m.WorkerUp(role))

    def _cancel_start(self, machine: Machine, action: m.CancelStart) -> None:
        """The latest start of the role that has not come up is given up."""
        numbers = [number for number, role in self._starting.items() if role == action.role]
        if numbers:
            del self._starting[numbers[-1]]
            self.counts["starts cancelled"] += 1

    def heal(self) -> None:
        """Everything works from now on: links, disks, clocks, machines."""
        self.calm = True
        self.network.heal()
        self.draining.clear()
        self._down.clear()
        self._settings_of.clear()
        if not self.store.up:
            self.store.restart(self.queue.now)
        for disk in self.store.disks.values():
            disk.up, disk.full = True, False
            disk.torn = disk.misdirected = disk.flipped = 0.0
        for name, machine in list(self.machines.items()):
            machine.busy = 0.0
            machine.set_clock(rate=1.0)
            engine = self.engines.get(name)
            if engine is not None:
                engine.hang, engine.nan, engine.speed = False, 0, 1.0
                group = getattr(engine, "group", None)
                if group is not None:
                    group.deaf.clear()
                if len(engine.ranks) < engine.shape.fewest:
                    self._kill(name)
            machine.go_on()
            machine.start()

    # Links and clients

    def _arrive(self, source: str, target: str, message: Any) -> None:
        machine = self.machines.get(target)
        if machine is None or machine.core is None:
            self.counts["to nobody"] += 1
            return
        if self.trace is not None:
            self.trace.message(self.queue.now, source, target, message)
        machine.receive(message)

    def entries(self) -> list[tuple[str, int]]:
        return [
            (name, machine.incarnation)
            for name, machine in self.machines.items()
            if self._roles[name] == "entry" and machine.up
        ]

    def tell(self, entry: str, life: int, event: Any) -> None:
        machine = self.machines.get(entry)
        if machine is not None and machine.incarnation == life:
            if self.trace is not None:
                self.trace.message(self.queue.now, "client", entry, event)
            machine.handle(event)
