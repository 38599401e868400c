"""What encoder, prefill and decode workers have in common: lives, reports, tombstones, failures that are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.roles.core import Core
from orchestrator.roles.engine_port import RankDied, Reform, Reformed
from orchestrator.roles.messages import (
    Drain,
    Exit,
    Gone,
    Holding,
    Key,
    Life,
    Release,
    Report,
    ReportAck,
    Role,
    WorkFailed,
)
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings

_EVERY = 1 << 62  # above all epochs
_GROUPS = 1000  # of ranks that one start of a worker may form; the next start's incarnations are above


@dataclass
class _Failure:
    message: WorkFailed
    entry: str
    since: float
    sent: float


class Worker(Core):
    """Subclasses say what they hold (`holdings`, `room`), how a request is freed (`free`) and what ends with a
    group (`_end_all`).

    Attributes:
        role, node, group: see `Report`. start: which life of the process this is, from 1.
        life: active, draining or reforming. ranks: that live. plan: version of the expert placement, as steps say.
        reading: tokens that wait at the node's network card, kept by the shell.
        router_incarnation: of the router that was heard last. gone: it has left.
        draining: it was told to leave. changed: a report is due.
    """

    role: Role

    def __init__(
        self,
        name: str,
        start: int = 1,
        settings: Settings | None = None,
        rules: Rules | None = None,
        *,
        node: str = "",
        group: str = "",
        ranks: int = 1,
    ) -> None:
        super().__init__(name, settings, rules)
        self.start, self.node, self.group, self.ranks = start, node or name, group or name, ranks
        self.life: Life = "active"
        self.gone = False
        self.reading = self.plan = self.router_incarnation = 0
        self._groups = self._reports = self._step = 0
        self._tombstones: dict[str, tuple[int, float]] = {}
        self._failures: dict[Key, _Failure] = {}
        self._reforming_to, self._reforming_at = 0, 0.0
        self._drained_at = self._grace = 0.0
        self.draining = self.changed = False
        self._step_since: float | None = None  # when the step in flight began
        self._on = {
            ReportAck: self._report_ack,
            Release: self._release,
            Drain: self._drain,
            RankDied: self._rank_died,
            Reformed: self._reformed,
        }

    @property
    def incarnation(self) -> int:
        return self.start * _GROUPS + self._groups

    # What subclasses say

    def holdings(self) -> list[Holding]:
        raise NotImplementedError

    def room(self) -> tuple[float, float]:
        """What it takes beyond what it holds, and what it takes when it holds nothing."""
        raise NotImplementedError

    def _rows(self) -> int:
        return 0

    def free(self, request: str, epoch: int) -> None:
        """Free what is held of a request up to an epoch. Nothing held is no error."""
        raise NotImplementedError

    def _end_all(self, why: str, now: float) -> None:
        """The engine's state is gone: fail every request."""
        raise NotImplementedError

    def _asked_since(self) -> float | None:
        """Since when the engine has owed an answer; None if it owes none."""
        return self._step_since

    def _resized(self, message: Reformed) -> None:
        """The group has formed anew with this much room."""

    # Reports

    def _started(self, now: float) -> None:
        self._report()

    def _watching(self) -> bool:
        return not self.gone

    def _after(self, now: float) -> None:
        if self.draining and self.life == "draining" and not self.gone and self._may_leave():
            self._leave()
        elif self.changed and not self.gone:
            self._report()
        self.changed = False

    def _report(self) -> None:
        self._reports += 1
        room, capacity = self.room()
        self.send(
            self.settings.router,
            Report(
                self.name,
                self.role,
                self.incarnation,
                self._reports,
                self.life,
                tuple(self.holdings()),
                room if self.life == "active" else 0.0,
                capacity,
                self._rows(),
                self.node,
                self.reading,
                self.group,
                self.ranks,
                self._step,
                self.plan,
            ),
        )

    def _report_ack(self, message: ReportAck, now: float) -> None:
        self.router_incarnation = max(self.router_incarnation, message.router_incarnation)

    # What is freed, and failures

    def _release(self, message: Release, now: float) -> None:
        epoch = _EVERY if message.ended else message.epoch
        self.free(message.request, epoch)
        for key in [k for k in self._failures if k[0] == message.request and k[1] <= epoch]:
            del self._failures[key]
        self._bury(message.request, epoch)
        self.changed = True

    def _bury(self, request: str, epoch: int) -> None:
        """Refuse what comes of a request up to this epoch from now on."""
        before = self._tombstones.pop(request, (0, 0.0))[0]  # so that the oldest stand first
        self._tombstones[request] = (max(epoch, before), self.age)

    def supersede(self, request: str, epoch: int) -> None:
        """A new epoch begins here: earlier ones are over."""
        if epoch > 1:
            self.free(request, epoch - 1)
            self._bury(request, epoch - 1)

    def buried(self, request: str, epoch: int) -> bool:
        """Whether this epoch of a request was freed before, or failed here."""
        if (request, epoch) in self._failures:
            return True
        return self.rules.keep_tombstones and epoch <= self._tombstones.get(request, (0, 0.0))[0]

    def other_life(self, incarnation: int) -> bool:
        """Whether a message was meant for another life of this worker."""
        return self.rules.check_incarnation and incarnation != self.incarnation

    def tell_failure(self, request: str, epoch: int, entry: str, why: str, now: float, *, retry: bool = True) -> None:
        """Tell an entry that an epoch ends here, until it answers."""
        message = WorkFailed(request, epoch, self.name, self.incarnation, why, retry)
        self._failures[request, epoch] = _Failure(message, entry, now, now)
        self.send(entry, message)
        self.changed = True

    # Drain

    def _drain(self, message: Drain, now: float) -> None:
        if self.other_life(message.incarnation) or self.draining:
            return
        self.draining, self._drained_at, self._grace = True, now, message.grace
        if self.life == "active":
            self.life = "draining"
        self.changed = True

    @property
    def grace_over(self) -> float:
        """When what is left has to go."""
        return self._drained_at + self._grace

    def _may_leave(self) -> bool:
        return not self.rules.drain_waits or not (self.holdings() or self._failures)

    def _leave(self) -> None:
        self.gone = True
        gone = Gone(self.name, self.role, self.incarnation)
        self.send(self.settings.router, gone)
        self.send(self.settings.scaler, gone)
        self.do(Exit(self.name))

    # Ranks

    def _rank_died(self, message: RankDied, now: float) -> None:
        self.life = "reforming"
        self._step_since = None
        self._end_all(f"a rank of {self.name} died", now)
        self._groups += 1
        self._reforming_to, self._reforming_at = self._groups, now
        self.do(Reform(self._groups))
        self.changed = True

    def _reformed(self, message: Reformed, now: float) -> None:
        if message.number != self._reforming_to:
            return  # another rank has died since
        self.ranks = message.ranks
        if message.why:
            self.draining, self._drained_at, self._grace = True, now, 0.0
        else:
            self._resized(message)
        self.life = "draining" if self.draining else "active"
        self.changed = True

    # Time

    def step(self, event: Any, now: float) -> list[Any]:
        return [] if self.gone else super().step(event, now)

    def _beat(self, now: float) -> None:
        times = self.settings
        asked = self._asked_since()
        if self.life != "reforming" and asked is not None and now - asked > times.answer:
            self._rank_died(RankDied(-1), now)  # a rank that hangs is as good as dead
        if self.life == "reforming" and now - self._reforming_at > times.reform:
            self._leave()
            return
        for key, failure in list(self._failures.items()):
            if now - failure.since > times.owner_lease:
                del self._failures[key]
            elif now - failure.sent >= times.resend:
                failure.sent = now
                self.send(failure.entry, failure.message)
        for request, (_, at) in list(self._tombstones.items()):
            if self.age - at <= times.tombstone:
                break
            del self._tombstones[request]
        self.changed = True  # a report each beat
