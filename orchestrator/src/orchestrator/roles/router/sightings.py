"""What reports tell of requests: the router learns what it does not know, and has freed what should not be held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.roles.messages import Holding, MoveWanted, Release, Report, ReportAck
from orchestrator.roles.router.records import Record, View

if TYPE_CHECKING:
    from orchestrator.roles.router.core import Router


class Sightings:
    """Compares each report with the records. A report is the truth about its worker, an epoch about a request."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def report(self, report: Report, now: float) -> None:
        router = self._router
        view = router.fleet.views.get(report.worker)
        if view is not None:
            known = view.report
            if report.incarnation < known.incarnation and router.rules.check_incarnation:
                return
            if report.incarnation != known.incarnation:
                router.drop_worker(view, "has restarted", now, certain=True)
                view = None
            elif report.number <= known.number:
                return
        if view is None:
            view = router.fleet.add(report, now)
            if report.role == "prefill":
                router.waiting.bins.add(report.worker)
        else:
            view.take(report, now)
        if report.role == "encoder":
            router.images.see_encoder(report.worker, active=report.life == "active")
        router.send(report.worker, ReportAck(report.worker, report.incarnation, report.number, router.incarnation))
        for holding in report.holding:
            self._see(view, holding, now)

    def _see(self, view: View, holding: Holding, now: float) -> None:
        router = self._router
        record = router.records.get(holding.request)
        if router.buried(holding.request, holding.epoch) or (record is not None and holding.epoch < record.epoch):
            self._free(view, holding)
        elif view.report.role == "encoder":
            if record is None and not router.settling(now):
                self._free(view, holding)
        elif record is None:
            record = Record(holding.request, holding.epoch, holding.entry, None, (), "unclaimed", wanted=now)
            router.records[holding.request] = record
            self._bind(record, view, holding, now)
        elif holding.epoch > record.epoch:  # its entry raised it, and this worker goes on with it
            spec = record.spec
            router.release(record, now, ended=False)
            record = Record(holding.request, holding.epoch, holding.entry, spec, (), "unclaimed", wanted=now)
            router.records[holding.request] = record
            self._bind(record, view, holding, now)
        else:
            self._see_same(record, view, holding, now)

    def _see_same(self, record: Record, view: View, holding: Holding, now: float) -> None:
        if record.state == "lost" and not holding.decoding:
            self._free(view, holding)
        elif record.state in ("unclaimed", "encoding", "queued", "lost"):
            self._router.unbind(record)
            self._bind(record, view, holding, now)
        elif view.place in record.places:
            self._bind(record, view, holding, now)
        elif view.report.role == "prefill":
            if record.prefill is None and record.state == "assigned":
                self._bind(record, view, holding, now)
            else:
                self._free(view, holding)
        elif record.decode is None or (holding.decoding and record.state != "decoding"):
            record.target = record.target or record.decode
            record.decode = None
            self._bind(record, view, holding, now)
        elif record.target is None:
            record.target, record.seen = view.place, now
        else:
            self._free(view, holding)

    def _bind(self, record: Record, view: View, holding: Holding, now: float) -> None:
        """A worker holds this epoch of a request, and may."""
        record.seen = now
        if view.report.role == "prefill":
            record.prefill = view.place
        elif view.place != record.target:
            record.decode = view.place
        if record.state not in ("assigned", "decoding"):
            record.state = "assigned"
        if holding.decoding and view.place == record.decode:
            record.state = "decoding"

    def _free(self, view: View, holding: Holding) -> None:
        self._router.send(view.report.worker, Release(holding.request, holding.epoch, ended=False))

    def running(self, message: MoveWanted, now: float) -> Record | None:
        """The record of a request that a draining worker decodes; None where that worker should not."""
        router = self._router
        view = router.fleet.at((message.worker, message.incarnation))
        if view is None:
            return None  # its next report tells of it
        holding = Holding(message.request, message.epoch, message.entry, 0, decoding=True)
        self._see(view, holding, now)
        record = router.records.get(message.request)
        return record if record is not None and record.epoch == message.epoch and record.decode == view.place else None
