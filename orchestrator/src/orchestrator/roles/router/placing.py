"""Pairs of a prefill and a decode worker for the requests that wait, and places for those that move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.balance.decode import Incoming, need
from orchestrator.balance.paths import PrefillLoad, choose_prefill, choose_side
from orchestrator.roles.messages import AssignPrefill, MoveTo, MoveWanted, Release, Reserve
from orchestrator.roles.router.records import Record, View

if TYPE_CHECKING:
    from orchestrator.roles.router.core import Router


class Placing:
    """Prefill workers pull: one with room left is given requests until the predicted seconds fill it.

    A request starts only with a place at a decode worker, so what is computed can always be handed over.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def dispatch(self, now: float) -> None:
        """Give out what waits, as far as there is room. The head of a queue is never passed by."""
        router = self._router
        waiting = router.waiting
        if router.settling(now) or not len(waiting):
            return
        loads = router.fleet.prefill_loads()
        if not loads:
            return
        engines, reading = router.fleet.decode_engines(), router.fleet.reading()
        while loads and len(waiting):
            chosen = choose_prefill(list(loads.values()), reading, router.policy.paths)
            if chosen is None:
                return
            record = self._next(chosen.name, now)
            if record is None:
                del loads[chosen.name]
                continue
            incoming = self._incoming(record)
            decode = router.fleet.choose_decode(engines, incoming)
            if decode is None:
                return  # a report with room, a release or a death wakes it
            waiting.pop(record.bin)
            waiting.charge(record, now)
            prefill = router.fleet.views[chosen.name]
            self._assign(record, prefill, decode, incoming.need, now)
            if prefill.room <= 0:
                del loads[chosen.name]
            else:
                loads[chosen.name] = PrefillLoad(chosen.name, chosen.tokens + incoming.length, chosen.node)

    def _next(self, engine: str, now: float) -> Record | None:
        """The request that an engine takes next, by its bin."""
        router, waiting = self._router, self._router.waiting
        heads: dict[int, Record] = {}
        for number in range(waiting.bins.count):
            request = waiting.peek(number)
            while request and request not in router.records:
                waiting.pop(number)
                request = waiting.peek(number)
            if request:
                heads[number] = router.records[request]
        ages = {number: now - record.queued for number, record in heads.items()}
        order = waiting.bins.order(engine, ages)
        return next((heads[number] for number in order if number in heads), None)

    def _incoming(self, record: Record) -> Incoming:
        assert record.spec is not None
        length = len(record.spec.prompt) + len(record.output)
        left = record.spec.max_tokens - len(record.output)
        expected = min(left, max(record.spec.expected_output - len(record.output), 1))
        tokens = need(length, expected, drafts=self._router.policy.drafts)
        largest = self._router.fleet.largest_decode()
        if length < largest < tokens:
            tokens = largest  # growth that nobody has room for is no reason to wait for ever
        return Incoming(record.request, length, tokens)

    def _assign(self, record: Record, prefill: View, decode: View, tokens: int, now: float) -> None:
        assert record.spec is not None
        paths = self._router.policy.paths
        record.state, record.seen = "assigned", now
        record.prefill, record.decode = prefill.place, decode.place
        prefill.give(record.key, record.cost)
        decode.give(record.key, tokens)
        record.reservation = Reserve(
            record.request,
            record.epoch,
            decode.report.incarnation,
            record.entry,
            record.spec,
            record.output,
            *prefill.place,
            need=tokens,
        )
        record.assignment = AssignPrefill(
            record.request,
            record.epoch,
            prefill.report.incarnation,
            record.entry,
            record.spec,
            record.output,
            *decode.place,
            side=choose_side(prefill.report.reading, decode.report.reading, paths),
            embeddings=tuple(e for e in record.embeddings.values() if e is not None),
        )
        self._send_both(record, now)

    def _send_both(self, record: Record, now: float) -> None:
        record.sent = now
        for place, message in ((record.decode, record.reservation), (record.prefill, record.assignment)):
            if place is not None and message is not None:
                self._router.send(place[0], message)

    def repeat(self, record: Record, now: float) -> None:
        """Send again what no report has named yet."""
        fleet = self._router.fleet
        where = record.target or record.decode
        for place, message in ((where, record.reservation), (record.prefill, record.assignment)):
            view = fleet.at(place)
            if view is not None and message is not None and record.key in view.given:
                self._router.send(view.report.worker, message)
                record.sent = now

    # Migration

    def move_wanted(self, message: MoveWanted, now: float) -> None:
        """A draining worker asks where a request may go on."""
        router = self._router
        if router.buried(message.request, message.epoch):
            router.send(message.worker, Release(message.request, message.epoch, ended=False))
            return
        record = router.sightings.running(message, now)
        if record is None:
            return
        if record.target is None or message.number > record.move:
            self._find_target(record, message, now)
        target = record.target or ("", 0)
        router.send(message.worker, MoveTo(message.request, message.epoch, message.number, *target))

    def _find_target(self, record: Record, message: MoveWanted, now: float) -> None:
        router = self._router
        before = router.fleet.at(record.target)
        if before is not None:
            before.forget(record.key)
            router.send(before.report.worker, Release(record.request, record.epoch, ended=False))
        record.target, record.move = None, message.number
        if router.settling(now):
            return
        record.spec, record.output = message.spec, message.output
        incoming = self._incoming(record)
        hidden = {message.worker} if before is None else {message.worker, before.report.worker}
        target = router.fleet.choose_decode(router.fleet.decode_engines(without=hidden), incoming)
        if target is None:
            return
        record.target, record.sent = target.place, now
        target.give(record.key, incoming.need)
        record.reservation = Reserve(
            record.request,
            record.epoch,
            target.report.incarnation,
            message.entry,
            message.spec,
            message.output,
            message.worker,
            message.incarnation,
            need=incoming.need,
            moving=True,
        )
        router.send(target.report.worker, record.reservation)
