"""The router's state machine. States and what ends them: docs/request_states.md, Router."""

from __future__ import annotations

from orchestrator.balance.admission import Never, Overloaded, check_load, check_size
from orchestrator.roles.core import Core
from orchestrator.roles.messages import (
    Accepted,
    Gone,
    ImageReady,
    Key,
    LoadReport,
    Lost,
    MoveWanted,
    Refused,
    Release,
    Released,
    Report,
    SourceGone,
    Submit,
    Unknown,
    Wanted,
)
from orchestrator.roles.router.fleet import Fleet
from orchestrator.roles.router.images import Images
from orchestrator.roles.router.placing import Placing
from orchestrator.roles.router.policy import RouterPolicy
from orchestrator.roles.router.records import Place, Record, Tombstone, View
from orchestrator.roles.router.sightings import Sightings
from orchestrator.roles.router.waiting import Waiting
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings


class Router(Core):
    """Attributes:
    records: requests that it knows. fleet: live workers. waiting: requests in bins.
    incarnation: of this router. refused: how many, by status.
    """

    def __init__(
        self,
        start: int = 1,
        policy: RouterPolicy | None = None,
        settings: Settings | None = None,
        rules: Rules | None = None,
    ) -> None:
        settings = settings or Settings()
        super().__init__(settings.router, settings, rules)
        self.incarnation, self.policy = start, policy or RouterPolicy()
        self.records: dict[str, Record] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.fleet, self.waiting = Fleet(), Waiting(self.policy)
        self.images = Images(self)
        self.placing = Placing(self)
        self.sightings = Sightings(self)
        self.refused: dict[int, int] = {}
        self.arrived_tokens = self.arrived_patches = 0
        self._open_at = float("inf")
        self._last_round = self._last_load = 0.0
        self._loads = 0
        self._on = {
            Submit: self._submit,
            Wanted: self._wanted,
            Release: self._release,
            Report: self._report,
            Gone: self._gone,
            ImageReady: self.images.ready,
            MoveWanted: self.placing.move_wanted,
        }

    @property
    def held(self) -> frozenset[Key]:
        return frozenset(record.key for record in self.records.values())

    def settling(self, now: float) -> bool:
        """Whether it only listens, since workers may hold what it does not know of yet."""
        return now < self._open_at

    def _started(self, now: float) -> None:
        self._open_at = now + self.settings.settle
        self._last_round = self._last_load = now

    def _watching(self) -> bool:
        return True

    # Entries

    def _submit(self, message: Submit, now: float) -> None:
        if self.buried(message.request, message.epoch):
            return
        record = self.records.get(message.request)
        if record is not None:
            if message.epoch < record.epoch:
                return
            if message.epoch == record.epoch:
                self._submit_again(record, message, now)
                return
            self.release(record, now, ended=False)
        record = Record(
            message.request,
            message.epoch,
            message.entry,
            message.spec,
            message.output,
            "unclaimed",
            wanted=now,
            seen=now,
        )
        if message.accepted_by not in (0, self.incarnation):
            # Another router let it in, so a worker may hold it: if none says so, it needs a new epoch.
            self.records[record.request] = record
            if self.settling(now):
                self.send(record.entry, Accepted(record.request, record.epoch, self.incarnation))
            else:
                self.lose(record, "unknown to the router after its restart", now)
            return
        if message.epoch == 1 and not message.output and not self._let_in(record, now):
            return
        self.records[record.request] = record
        self.send(record.entry, Accepted(record.request, record.epoch, self.incarnation))
        self.arrived_tokens += len(message.spec.prompt) + len(message.output) - message.spec.hit
        self.enqueue(record, now)
        self.placing.dispatch(now)

    def _submit_again(self, record: Record, message: Submit, now: float) -> None:
        record.wanted = now
        if record.spec is None:
            record.spec, record.output, record.entry = message.spec, message.output, message.entry
        self._answer(record)
        if not self.rules.know_retries and record.state != "lost":
            self.enqueue(record, now)
            self.placing.dispatch(now)

    def _answer(self, record: Record) -> None:
        if record.state == "lost":
            self.send(record.entry, Lost(record.request, record.epoch, record.why, record.certain))
        else:
            self.send(record.entry, Accepted(record.request, record.epoch, self.incarnation))

    def _let_in(self, record: Record, now: float) -> bool:
        """The door. What is in stays in; what is refused leaves no trace here."""
        assert record.spec is not None
        prefill = [v for v in self.fleet.of("prefill") if v.active]
        capacity = max(1, len(prefill)) if self.settling(now) else len(prefill)
        waiting = len(self.waiting) + len(self.images.encoding)
        try:
            check_size(len(record.spec.prompt), 1, self.policy.limits)
            own = self.waiting.cost(record)
            # What holds requests up is prefill's time or decode's room; the pace of starts shows the second.
            queued = max(self.waiting.seconds, self.waiting.pace(now) * waiting * capacity)
            check_load(queued, capacity, 0.0, own, waiting, self.policy.limits)
        except Never as error:
            self._refuse(record, 400, 0, str(error))
        except Overloaded as error:
            self._refuse(record, 429, error.retry_after, str(error))
        else:
            return True
        return False

    def _refuse(self, record: Record, status: int, retry_after: int, why: str) -> None:
        self.refused[status] = self.refused.get(status, 0) + 1
        self.send(record.entry, Refused(record.request, record.epoch, status, retry_after, why))

    def enqueue(self, record: Record, now: float) -> None:
        """To the encoders if images are missing, else to the queue; what was in before goes first."""
        if not self.images.missing(record, now):
            self.waiting.push(record, now, front=record.epoch > 1)

    def _wanted(self, message: Wanted, now: float) -> None:
        record = self.records.get(message.request)
        if record is not None and record.epoch == message.epoch:
            record.wanted = now
            if record.spec is None and record.state == "unclaimed":
                self.send(message.entry, Unknown(message.request, message.epoch))
            else:
                self._answer(record)
        elif record is None and not self.buried(message.request, message.epoch):
            self.send(message.entry, Unknown(message.request, message.epoch))

    def _release(self, message: Release, now: float) -> None:
        record = self.records.get(message.request)
        if record is not None and record.epoch <= message.epoch:
            if message.ended:
                self.waiting.charge_output(record, message.output)
            self.release(record, now, ended=message.ended)
        self.bury(message.request, message.epoch, message.ended)
        if message.entry:
            self.send(message.entry, Released(message.request, message.epoch))
        self.placing.dispatch(now)

    # Workers

    def _report(self, report: Report, now: float) -> None:
        self.sightings.report(report, now)
        self.placing.dispatch(now)

    def _gone(self, message: Gone, now: float) -> None:
        view = self.fleet.at((message.worker, message.incarnation))
        if view is not None:
            self.drop_worker(view, "left", now, certain=True)

    def drop_worker(self, view: View, why: str, now: float, *, certain: bool = False) -> None:
        """A life of a worker is over, or taken for over without being `certain`, and with it all that it held."""
        name, gone = view.report.worker, view.place
        del self.fleet.views[name]
        self.waiting.bins.remove(name)
        self.images.drop_encoder(name, now)
        for record in list(self.records.values()):
            if record.target == gone:
                record.target = None
            elif gone == record.decode:
                self.lose(record, f"{name} {why}", now, certain=certain)
            elif gone == record.prefill and record.state == "assigned":
                self._lose_source(record, f"{name} {why}", now)

    def _lose_source(self, record: Record, why: str, now: float) -> None:
        """A prefill worker died. Its target may have everything already, and knows; it fails the epoch if not."""
        target = self.fleet.at(record.decode)
        if target is None or record.key in target.given or record.prefill is None:
            self.lose(record, why, now)
            return
        self.send(target.report.worker, SourceGone(record.request, record.epoch, *record.prefill))
        record.prefill = record.assignment = None

    # What all parts use

    def buried(self, request: str, epoch: int) -> bool:
        """Whether this epoch of a request was released before."""
        tombstone = self.tombstones.get(request)
        return self.rules.keep_tombstones and tombstone is not None and (tombstone.ended or epoch <= tombstone.epoch)

    def bury(self, request: str, epoch: int, ended: bool) -> None:
        before = self.tombstones.pop(request, None)  # so that the oldest stand first
        if before is not None:
            epoch, ended = max(epoch, before.epoch), ended or before.ended
        self.tombstones[request] = Tombstone(epoch, ended, self.age)

    def unbind(self, record: Record) -> list[Place]:
        """Take a request out of queues and counts; returns the workers that may hold something of it."""
        places = record.places
        for place in places:
            view = self.fleet.at(place)
            if view is not None:
                view.forget(record.key)
        if record.state == "queued":
            self.waiting.remove(record)
        self.images.forget(record)
        record.prefill = record.decode = record.target = None
        record.assignment = record.reservation = None
        return places

    def release(self, record: Record, now: float, *, ended: bool) -> None:
        """Forget a request, have its workers forget it too, and remember that."""
        encoders = tuple(record.encoders.values())
        places = self.unbind(record)
        del self.records[record.request]
        for name in dict.fromkeys((*encoders, *(name for name, _ in places))):  # in an order that no hash decides
            self.send(name, Release(record.request, record.epoch, ended))
        self.bury(record.request, record.epoch, ended)

    def lose(self, record: Record, why: str, now: float, *, certain: bool = False) -> None:
        """This epoch is over; its entry is to raise it."""
        for name, _ in self.unbind(record):
            self.send(name, Release(record.request, record.epoch, ended=False))
        record.state, record.why, record.certain, record.wanted = "lost", why, certain, now
        self.send(record.entry, Lost(record.request, record.epoch, why, certain))

    # Time

    def _beat(self, now: float) -> None:
        times = self.settings
        if self.rules.drop_dead:
            for view in self.fleet.silent(now, times.lease):
                self.drop_worker(view, "is silent", now)
        for record in list(self.records.values()):
            self._check(record, now)
        self.images.assign(now)
        for request, tombstone in list(self.tombstones.items()):
            if self.age - tombstone.at <= times.tombstone:
                break
            del self.tombstones[request]
        if now - self._last_round >= self.policy.round:
            self.waiting.round(now - self._last_round)
            self._last_round = now
        if self.policy.load and now - self._last_load >= self.policy.load and not self.settling(now):
            self._tell_load(now)
        self.placing.dispatch(now)

    def _check(self, record: Record, now: float) -> None:
        times = self.settings
        if record.state != "decoding" and now - record.wanted > times.submit_lease:
            self.release(record, now, ended=False)
            del self.tombstones[record.request]  # its entry was slow, or is gone: it may come again
        elif record.state == "unclaimed":
            if not self.settling(now):
                self.lose(record, "no worker has it after a restart of the router", now)
        elif record.state in ("assigned", "decoding"):
            if now - record.seen > times.unreported:
                self.lose(record, "no worker reports it", now)
            elif now - record.sent >= times.resend:
                self.placing.repeat(record, now)

    def _tell_load(self, now: float) -> None:
        self._last_load = now
        self._loads += 1
        fleet, patches = self.fleet, self.images.backlog()
        self.send(
            self.settings.scaler,
            LoadReport(
                self.incarnation,
                self._loads,
                (
                    fleet.load("encoder", self.arrived_patches, patches),
                    fleet.load("prefill", self.arrived_tokens, self.waiting.missed),
                    fleet.load("decode", 0, 0, waiting=len(self.waiting)),
                ),
            ),
        )
        self.arrived_tokens = self.arrived_patches = 0
