"""The scaler role: what each role wants from what the router reports, and drains for what is too much."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_core.check import require
from orchestrator.balance.scaling import Change, Rate, ScalePolicy, decode_want, encoder_want, prefill_want, trade
from orchestrator.balance.scaling import Scaler as RoleScaler
from orchestrator.roles.core import Core
from orchestrator.roles.messages import (
    CancelStart,
    Drain,
    Gone,
    Key,
    LoadReport,
    Role,
    RoleLoad,
    StartWorker,
    WorkerUp,
)
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings

ROLES: tuple[Role, ...] = ("encoder", "prefill", "decode")


@dataclass(frozen=True)
class ScalerOptions:
    """Attributes:
    policies: bounds and rates by role. period: seconds between decisions. smooth: time constant of rates, seconds.
    tokens_s: missed tokens a second that a prefill worker computes. patches_s: patches of an encoder.
    rows, pool: requests and tokens of cache that a decode worker is planned with.
    spares: warm machines. stale: seconds without a report after which nothing is decided.
    """

    tokens_s: float
    patches_s: float
    rows: int
    pool: int
    policies: dict[Role, ScalePolicy] = field(default_factory=lambda: {role: ScalePolicy() for role in ROLES})
    period: float = 30.0
    smooth: float = 60.0
    spares: int = 0
    stale: float = 15.0

    def __post_init__(self) -> None:
        for name in ("tokens_s", "patches_s", "rows", "pool", "period", "smooth", "stale"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        require(self.spares >= 0, "spares", self.spares, "0 or more")
        require(set(self.policies) == set(ROLES), "policies", sorted(self.policies), f"one for each of {ROLES}")


@dataclass
class _Leaving:
    """A worker that drains. `becomes`: the role that its machine takes then, if any."""

    incarnation: int
    sent: float
    becomes: Role | None = None


class Scaler(Core):
    """Attributes:
    leaving: workers that were told to drain and have not gone. spares: machines that are free.
    """

    def __init__(self, options: ScalerOptions, settings: Settings | None = None, rules: Rules | None = None) -> None:
        settings = settings or Settings()
        super().__init__(settings.scaler, settings, rules)
        self.options, self.spares = options, options.spares
        self.leaving: dict[str, _Leaving] = {}
        self._scalers = {role: RoleScaler(policy) for role, policy in options.policies.items()}
        self._loads: dict[Role, RoleLoad] = {}
        self._rates: dict[Role, Rate] = {role: Rate(options.smooth) for role in ROLES}
        self._heard: float | None = None
        self._latest = (0, 0)
        self._decided = 0.0
        self._on = {LoadReport: self._load, Gone: self._gone, WorkerUp: self._up}

    @property
    def held(self) -> frozenset[Key]:
        return frozenset()

    def _started(self, now: float) -> None:
        self._decided = now

    def _watching(self) -> bool:
        return True

    def _load(self, report: LoadReport, now: float) -> None:
        order = (report.router_incarnation, report.number)
        if order <= self._latest:
            return
        self._latest = order
        elapsed = None if self._heard is None else now - self._heard
        self._heard = now
        for load in report.roles:
            self._loads[load.role] = load
            if elapsed is not None and elapsed > 0:
                self._rates[load.role] = self._rates[load.role].after(load.arrived, elapsed)
        present = {name for load in report.roles for name in (*load.workers, *load.draining)}
        for name in [n for n, leaving in self.leaving.items() if n not in present and now > leaving.sent]:
            self._left(name)

    def _gone(self, message: Gone, now: float) -> None:
        leaving = self.leaving.get(message.worker)
        if leaving is not None and leaving.incarnation <= message.incarnation:
            self._left(message.worker)

    def _left(self, name: str) -> None:
        """A machine is free: for the role that waits for it, or as a spare."""
        becomes = self.leaving.pop(name).becomes
        if becomes is not None:
            self.do(StartWorker(becomes))
        elif self.spares < self.options.spares:
            self.spares += 1

    def _up(self, event: WorkerUp, now: float) -> None:
        scaler = self._scalers[event.role]
        scaler.failed_start() if event.failed else scaler.came_up()

    def _beat(self, now: float) -> None:
        for name, leaving in self.leaving.items():
            if now - leaving.sent >= 4 * self.settings.beat:
                leaving.sent = now
                self.send(name, Drain(name, leaving.incarnation, self.settings.grace))
        if now - self._decided >= self.options.period:
            self._decided = now
            self._decide(now)

    def _decide(self, now: float) -> None:
        changes = {role: self._change(role, now) for role in ROLES}
        moves, spares = trade({role: change for role, change in changes.items()}, self.spares)
        becomes: dict[str, list[Role]] = {}
        taken: dict[str, int] = {}
        for giving, taking in moves:
            becomes.setdefault(giving, []).append(taking)  # type: ignore[arg-type]
            taken[taking] = taken.get(taking, 0) + 1
        for role, change in changes.items():
            for _ in range(change.cancel):
                self.do(CancelStart(role))
            for _ in range(change.start - taken.get(role, 0)):
                spare = spares > 0
                spares -= spare
                self.spares -= spare
                self.do(StartWorker(role, spare))
            self._stop(role, change.stop, becomes.get(role, []), now)

    def _change(self, role: Role, now: float) -> Change:
        load = self._loads.get(role)
        known = load is not None and self._heard is not None and now - self._heard <= self.options.stale
        running = len(load.workers) if load is not None else 0
        if load is None or not known:
            # Without a report nobody knows what runs: hold.
            return Change(why="no report")
        return self._scalers[role].period(running, self._want(role, load), load.use)

    def _want(self, role: Role, load: RoleLoad) -> int:
        options, rate = self.options, self._rates[role].value
        if role == "prefill":
            return prefill_want(rate, load.backlog, options.tokens_s)
        if role == "encoder":
            return encoder_want(rate, load.backlog, options.patches_s)
        return decode_want(load.requests, load.held, options.rows, options.pool)

    def _stop(self, role: Role, count: int, becomes: list[Role], now: float) -> None:
        load = self._loads.get(role)
        if load is None or count <= 0:
            return
        staying = [(n, i) for n, i in zip(load.workers, load.incarnations, strict=True) if n not in self.leaving]
        for name, incarnation in staying[-count:]:
            self.leaving[name] = _Leaving(incarnation, now, becomes.pop(0) if becomes else None)
            self.send(name, Drain(name, incarnation, self.settings.grace))
        self._loads[role] = replace_workers(load, {name for name, _ in staying[-count:]})


def replace_workers(load: RoleLoad, without: set[str]) -> RoleLoad:
    """A load as it is once some workers drain."""
    kept = [(n, i) for n, i in zip(load.workers, load.incarnations, strict=True) if n not in without]
    return RoleLoad(
        load.role,
        tuple(n for n, _ in kept),
        tuple(i for _, i in kept),
        (*load.draining, *sorted(without)),
        load.use,
        0,
        load.backlog,
        load.requests,
        load.held,
    )
