"""Migration of a running request with its state: out of a draining worker, into another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from orchestrator.roles.decode.row import Row
from orchestrator.roles.engine_port import Export as ExportState
from orchestrator.roles.engine_port import Exported, Rename, Thaw
from orchestrator.roles.messages import Landed, MoveTo, MoveWanted, Resume, SourceAlive, Taken, TargetAlive, Want
from orchestrator.roles.outgoing import Outgoing

if TYPE_CHECKING:
    from orchestrator.roles.decode.core import Decode


class Moving:
    """The source stands still from the copy on until the target has it, or is given up: then it goes on by itself.

    Which of the two copies counts is for the entry to say: it raises the epoch for the target.
    """

    def __init__(self, worker: Decode) -> None:
        self._worker = worker

    # Out

    def check(self, row: Row, now: float) -> None:
        """A beat of a row that runs: once the grace of a drain is over it has to go."""
        worker, times = self._worker, self._worker.settings
        if row.state == "moving":
            self._check_moving(row, now)
        elif worker.draining and row.state == "decoding" and now >= worker.grace_over:
            if now >= worker.grace_over + times.move:
                worker.fail(row, f"{worker.name} leaves", now)
            elif now - row.sent >= times.resend:
                row.sent = now
                order = row.order
                wanted = MoveWanted(
                    *row.key,
                    worker.name,
                    worker.incarnation,
                    order.entry,
                    order.spec,
                    tuple(row.output),
                    row.move + 1,
                )
                worker.send(times.router, wanted)

    def _check_moving(self, row: Row, now: float) -> None:
        worker = self._worker
        assert row.target is not None
        if now - row.heard > worker.settings.transfer_lease:
            self._thaw(row, now)
        elif row.outgoing is not None:
            worker.do(row.outgoing.word(now))
        else:
            worker.send(row.target[0], SourceAlive(*row.key, worker.name, worker.incarnation))

    def move_to(self, message: MoveTo, now: float) -> None:
        worker = self._worker
        row = worker.rows.get((message.request, message.epoch))
        if row is None or row.state != "decoding" or not worker.draining or message.number != row.move + 1:
            return
        if not message.target:
            return  # it goes on here and asks again
        row.state, row.move, row.heard, row.since = "moving", message.number, now, now
        row.target = (message.target, message.target_incarnation)
        worker.do(ExportState(*row.key))
        worker.send(message.target, SourceAlive(*row.key, worker.name, worker.incarnation))

    def exported(self, message: Exported, now: float) -> None:
        worker = self._worker
        row = worker.rows.get((message.request, message.epoch))
        if row is None or row.state != "moving" or row.outgoing is not None or row.target is None:
            return
        if message.manifest is None:
            self._thaw(row, now)
            return
        known = len(row.output)
        row.output = list(message.manifest.output)
        row.note(message.manifest.notes)
        manifest = replace(message.manifest, notes=row.notes_from(row.acked))
        if len(row.output) > known:
            worker.tell(row, now, known)
        row.outgoing = Outgoing(
            *row.key, worker.name, worker.incarnation, *row.target, manifest, message.parts, heard=now
        )
        worker.do(row.outgoing.offer(now))
        if not worker.rules.hold_until_taken:
            row.outgoing.parts = ()

    def _thaw(self, row: Row, now: float) -> None:
        """It goes on here; the next attempt is a new one."""
        row.state, row.outgoing, row.target = "decoding", None, None
        self._worker.do(Thaw(*row.key))
        self._worker.pump(now)

    def _heard(self, message: TargetAlive | Want | Taken) -> Row | None:
        row = self._worker.rows.get((message.request, message.epoch))
        if row is None or row.state != "moving" or row.target != (message.target, message.target_incarnation):
            return None
        return row

    def target_alive(self, message: TargetAlive, now: float) -> None:
        row = self._heard(message)
        if row is not None and message.ready:
            row.heard = now

    def want(self, message: Want, now: float) -> None:
        row = self._heard(message)
        if row is None or row.outgoing is None or self._worker.other_life(message.source_incarnation):
            return
        row.heard = now
        for send in row.outgoing.answer(message, now):
            self._worker.do(send)

    def taken(self, message: Taken, now: float) -> None:
        row = self._heard(message)
        if row is None:
            return
        if message.good:
            self._worker.remove(row)
        else:
            self._thaw(row, now)

    # In

    def land(self, row: Row, now: float) -> None:
        """Tell the entry that a copy stands ready."""
        worker = self._worker
        landed = Landed(*row.key, worker.name, worker.incarnation, tuple(row.output))
        worker.send(row.order.entry, landed)

    def resume(self, message: Resume, now: float) -> None:
        worker = self._worker
        key = (message.request, message.epoch)
        row = worker.rows.get(key)
        if row is None or row.state != "landed" or worker.other_life(message.incarnation):
            return
        del worker.rows[key]
        row.epoch, row.state = message.new_epoch, "decoding"
        row.acked, row.acked_at = min(message.upto, len(row.output)), now
        worker.rows[row.key] = row
        worker.moved_in[key] = row.key
        worker.do(Rename(*key, row.epoch))
        worker.changed = True
        if len(row.output) >= row.order.spec.max_tokens:
            worker.finish(row, "length", now)
            return
        worker.tell(row, now, row.acked)
        worker.pump(now)
