"""The decode role: takes states in, steps all of its requests together, tells their entries what comes out.

States and what ends them: docs/request_states.md, Decode.
"""

from __future__ import annotations

from orchestrator.roles.decode.moving import Moving
from orchestrator.roles.decode.receiving import Receiving
from orchestrator.roles.decode.row import DecodeOptions, Row
from orchestrator.roles.engine_port import (
    DecodeDone,
    DecodeOutput,
    Drop,
    Dropped,
    Exported,
    Loaded,
    Reformed,
    RunDecode,
)
from orchestrator.roles.messages import (
    Holding,
    Key,
    MoveTo,
    Offer,
    Piece,
    Reserve,
    Resume,
    SourceAlive,
    SourceGone,
    Taken,
    TargetAlive,
    Tokens,
    TokensAck,
    Want,
)
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings
from orchestrator.roles.worker import Worker


class Decode(Worker):
    """Attributes:
    rows: requests by their present key. moved_in: by the key under which they came, if that is another.
    options: with what the group has room for now.
    """

    role = "decode"

    def __init__(
        self,
        name: str,
        options: DecodeOptions,
        start: int = 1,
        settings: Settings | None = None,
        rules: Rules | None = None,
        *,
        node: str = "",
        group: str = "",
    ) -> None:
        super().__init__(name, start, settings, rules, node=node, group=group, ranks=options.ranks)
        self.options = options
        self.capacity, self.most_rows = options.tokens, options.rows
        self.rows: dict[Key, Row] = {}
        self.moved_in: dict[Key, Key] = {}
        self.receiving, self.moving = Receiving(self), Moving(self)
        self._running: RunDecode | None = None
        self._on |= {
            Reserve: self.receiving.reserve,
            SourceAlive: self.receiving.source_alive,
            SourceGone: self.receiving.source_gone,
            Offer: self.receiving.offer,
            Piece: self.receiving.piece,
            Loaded: self.receiving.loaded,
            DecodeDone: self._step_done,
            Dropped: self._dropped,
            TokensAck: self._acked,
            MoveTo: self.moving.move_to,
            Exported: self.moving.exported,
            TargetAlive: self.moving.target_alive,
            Want: self.moving.want,
            Taken: self.moving.taken,
            Resume: self.moving.resume,
        }

    @property
    def held(self) -> frozenset[Key]:
        return frozenset(self.rows) | frozenset(self._failures)

    def holdings(self) -> list[Holding]:
        running = ("decoding", "moving", "telling")
        return [
            Holding(*key, row.order.entry, row.tokens, decoding=row.state in running) for key, row in self.rows.items()
        ]

    def room(self) -> tuple[float, float]:
        return self.capacity - sum(row.tokens for row in self.rows.values()), self.capacity

    def _rows(self) -> int:
        return self.most_rows

    def _asked_since(self) -> float | None:
        asked = [
            row.since
            for row in self.rows.values()
            if row.state == "loading" or (row.state == "moving" and row.outgoing is None)
        ]
        return min(asked if self._step_since is None else [self._step_since, *asked], default=None)

    def _resized(self, message: Reformed) -> None:
        self.capacity, self.most_rows = int(message.room), message.rows

    # Steps

    def pump(self, now: float) -> None:
        """Start a step if there is none and something runs."""
        if self._running is not None or self.life == "reforming":
            return
        owned = (
            now - self.settings.owner_lease
        )  # a worker that was stopped for long finds out here, before its next beat
        keys = tuple(key for key, row in self.rows.items() if row.state == "decoding" and row.acked_at >= owned)
        if keys:
            self._step += 1
            self._step_since = now
            self._running = RunDecode(self._step, keys)
            self.do(self._running)

    def _step_done(self, message: DecodeDone, now: float) -> None:
        if self._running is None or message.step != self._running.step:
            return  # of a group that has ended
        self._running, self._step_since, self.plan = None, None, message.plan
        for output in message.outputs:
            row = self.rows.get((output.request, output.epoch))
            if row is not None and row.state in ("decoding", "moving"):
                self._take(row, output, now)
        self.pump(now)

    def _take(self, row: Row, output: DecodeOutput, now: float) -> None:
        """What a step gave for a request."""
        if output.reason not in ("", "stop", "length"):
            self.fail(row, output.error or output.reason, now)
            return
        row.output.extend(output.tokens)
        row.note(output.notes)
        if output.reason:
            self.finish(row, output.reason, now)
        elif output.tokens:
            self.tell(row, now, len(row.output) - len(output.tokens))

    def finish(self, row: Row, reason: str, now: float) -> None:
        """The output has come to its end: cache is given back, the end is told until it is known."""
        told = row.acked
        if row.in_engine:
            self.do(Drop(*row.key))
        row.state, row.reason, row.outgoing, row.acked_at = "telling", reason, None, now
        row.got = {}
        self.tell(row, now, told)
        self.changed = True

    def tell(self, row: Row, now: float, first: int) -> None:
        """Tell the entry all output from `first` on."""
        row.told_at = now
        if first <= row.acked:
            row.waits_since = now
        self.send(
            row.order.entry,
            Tokens(
                *row.key,
                self.name,
                self.incarnation,
                self._step,
                self.plan,
                first,
                tuple(row.output[first:]),
                row.reason,
                row.cached,
                row.notes_from(first),
            ),
        )

    def _acked(self, message: TokensAck, now: float) -> None:
        row = self.rows.get((message.request, message.epoch))
        if row is None:
            return
        row.acked_at = now
        if message.upto > row.acked:
            if row.notes:
                for index in range(row.acked, message.upto):
                    row.notes.pop(index, None)
            row.acked, row.waits_since = min(message.upto, len(row.output)), now
        elif row.acked < len(row.output) and now - row.waits_since >= self.settings.resend / 4:
            self.tell(row, now, row.acked)  # it asks for what it misses

    def _dropped(self, message: Dropped, now: float) -> None:
        """The engine's memory is free; it was not counted any more."""

    # Ends

    def remove(self, row: Row) -> None:
        """Free all that is held of a request."""
        if row.in_engine:
            self.do(Drop(*row.key))
        del self.rows[row.key]
        self.moved_in.pop((row.order.request, row.order.epoch), None)
        self.changed = True

    def fail(self, row: Row, why: str, now: float) -> None:
        """This epoch ends here; source and entry are told."""
        if row.state in ("reserved", "pulling", "loading"):
            self.receiving.decline(row, why)
        self.remove(row)
        if row.order.moving and row.state in ("reserved", "pulling", "loading", "landed"):
            return  # the source goes on with the same epoch
        self.tell_failure(*row.key, row.order.entry, why, now)

    def free(self, request: str, epoch: int) -> None:
        for row in [r for r in self.rows.values() if r.order.request == request and r.epoch <= epoch]:
            self.remove(row)

    def _end_all(self, why: str, now: float) -> None:
        self._running = None
        for row in list(self.rows.values()):
            if row.state != "telling":
                self.fail(row, why, now)

    # Time

    def _beat(self, now: float) -> None:
        super()._beat(now)
        for row in list(self.rows.values()):
            if row.state in ("reserved", "pulling", "loading"):
                self.receiving.check(row, now)
            elif now - row.acked_at > self.settings.owner_lease:
                self.remove(row)  # nobody is left to tell
            elif row.state == "landed":
                self.moving.land(row, now)
            else:
                self._repeat(row, now)
                self.moving.check(row, now)
        self.pump(now)

    def _repeat(self, row: Row, now: float) -> None:
        """What is not acknowledged, or that the request lives."""
        if row.acked < len(row.output) or row.reason:
            if now - row.waits_since >= self.settings.resend:
                self.tell(row, now, row.acked)
        elif now - row.told_at >= self.settings.beat:
            self.tell(row, now, len(row.output))
