"""The target's side of a transfer: room first, then a manifest, then parts, checked, then the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.roles.decode.row import Row
from orchestrator.roles.engine_port import Expect, Load, Loaded
from orchestrator.roles.messages import Offer, Piece, Reserve, SourceAlive, SourceGone, Taken, TargetAlive, Want
from orchestrator.roles.state_parts import fault_of, is_whole

if TYPE_CHECKING:
    from orchestrator.roles.decode.core import Decode


class Receiving:
    """Nothing is decoded that did not come whole: a state is loaded, or its epoch fails."""

    def __init__(self, worker: Decode) -> None:
        self._worker = worker

    def reserve(self, order: Reserve, now: float) -> None:
        worker, key = self._worker, (order.request, order.epoch)
        if worker.other_life(order.incarnation) or worker.buried(*key):
            return
        if key in worker.rows or key in worker.moved_in:
            return
        if worker.life != "active":
            self._refuse(order, f"{worker.name} takes nothing new", now)
            return
        worker.supersede(order.request, order.epoch)
        room, _ = worker.room()
        row = Row(order, now, order.epoch, output=list(order.output), acked=len(order.output))
        if row.tokens > room or (worker.most_rows and len(worker.rows) >= worker.most_rows):
            self._refuse(order, f"{worker.name} has no room", now)
            return
        worker.rows[key] = row

    def _refuse(self, order: Reserve, why: str, now: float) -> None:
        worker = self._worker
        if order.moving:
            worker.send(order.source, self._taken(order, good=False, why=why))
        else:
            worker.tell_failure(order.request, order.epoch, order.entry, why, now)

    def _taken(self, order: Reserve | SourceAlive | Offer, *, good: bool, why: str = "") -> Taken:
        worker = self._worker
        return Taken(order.request, order.epoch, worker.name, worker.incarnation, good, why)

    def _find(self, message: SourceAlive | Offer | Piece | SourceGone) -> Row | None:
        """The row that a source's word is about, if that source was announced for it."""
        worker = self._worker
        key = (message.request, message.epoch)
        row = worker.rows.get(worker.moved_in.get(key, key))
        if row is None or (
            worker.rules.check_incarnation and message.source_incarnation != row.order.source_incarnation
        ):
            return None
        return row

    def source_alive(self, message: SourceAlive, now: float) -> None:
        worker, row = self._worker, self._find(message)
        if row is None:
            if worker.buried(message.request, message.epoch):
                worker.send(message.source, self._taken(message, good=False, why="released"))
            else:
                alive = TargetAlive(message.request, message.epoch, worker.name, worker.incarnation, ready=False)
                worker.send(message.source, alive)
        elif row.state in ("reserved", "pulling", "loading"):
            row.heard = now
            if message.ticket and row.state == "reserved" and not row.expected:
                row.expected = True
                worker.do(Expect(*row.key, message.ticket))
            alive = TargetAlive(message.request, message.epoch, worker.name, worker.incarnation, ready=True)
            worker.send(message.source, alive)
        else:
            worker.send(message.source, self._taken(message, good=True))

    def source_gone(self, message: SourceGone, now: float) -> None:
        row = self._find(message)
        if row is not None and row.state in ("reserved", "pulling") and row.order.source == message.source:
            self._worker.fail(row, f"{message.source} is gone", now)

    def offer(self, message: Offer, now: float) -> None:
        worker, row = self._worker, self._find(message)
        if worker.other_life(message.target_incarnation):
            return
        if row is None or row.state not in ("reserved", "pulling"):
            alive = SourceAlive(message.request, message.epoch, message.source, message.source_incarnation)
            self.source_alive(alive, now)
            return
        row.heard = now
        if row.state == "pulling":
            return
        manifest, order = message.manifest, row.order
        fault = fault_of(
            manifest, worker.options.layout, len(order.spec.prompt), order.output, grammar=bool(order.spec.grammar)
        )
        if fault and worker.rules.check_parts:
            worker.fail(row, f"state of {message.source}: {fault}", now)
            return
        row.manifest, row.cached = manifest, manifest.cached
        if manifest.reason:
            row.output, row.acked_at = list(manifest.output), now
            row.note(manifest.notes)
            worker.send(message.source, self._taken(message, good=True))
            worker.finish(row, manifest.reason, now)
            return
        row.state = "pulling"
        self._ask(row, now)

    def _ask(self, row: Row, now: float) -> None:
        worker, order = self._worker, row.order
        row.sent = now
        want = Want(
            order.request,
            order.epoch,
            worker.name,
            worker.incarnation,
            order.source_incarnation,
            row.missing,
        )
        worker.send(order.source, want)

    def piece(self, message: Piece, now: float) -> None:
        row = self._find(message)
        if row is None or row.state != "pulling" or row.manifest is None:
            return
        row.heard = now
        if not 0 <= message.part < len(row.manifest.parts) or message.part in row.got:
            return
        if self._worker.rules.check_parts and not is_whole(row.manifest.parts[message.part], message.payload):
            return  # it is asked for again
        row.got[message.part] = message.payload
        row.tries = 0
        if not row.missing:
            row.state, row.since = "loading", now
            parts = tuple(row.got[number] for number in range(len(row.manifest.parts)))
            row.got = {}
            self._worker.do(Load(*row.key, row.order.spec, row.manifest, parts))

    def loaded(self, message: Loaded, now: float) -> None:
        worker = self._worker
        row = worker.rows.get((message.request, message.epoch))
        if row is None or row.state != "loading" or row.manifest is None:
            return
        if message.why:
            worker.fail(row, message.why, now)
            return
        order, known = row.order, len(row.order.output)
        row.output, row.acked_at = list(row.manifest.output), now
        row.note(row.manifest.notes)
        worker.send(order.source, self._taken(order, good=True))
        worker.changed = True
        if order.moving:
            row.state = "landed"
            worker.moving.land(row, now)
            return
        row.state = "decoding"
        if len(row.output) >= order.spec.max_tokens:
            worker.finish(row, "length", now)
            return
        worker.tell(row, now, known)
        worker.pump(now)

    def decline(self, row: Row, why: str) -> None:
        self._worker.send(row.order.source, self._taken(row.order, good=False, why=why))

    def check(self, row: Row, now: float) -> None:
        """A beat of a row whose state has not come yet."""
        worker, times = self._worker, self._worker.settings
        if row.state == "loading":
            return  # the engine answers, or its group ends
        if now - row.heard > times.transfer_lease:
            worker.fail(row, f"{row.order.source} is silent", now)
        elif row.state == "pulling" and now - row.sent >= times.resend:
            row.tries += 1
            if row.tries > times.piece_tries:
                worker.fail(row, f"{len(row.missing)} parts of the state did not come whole", now)
            else:
                self._ask(row, now)
