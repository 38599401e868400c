"""The requests of one rank: commands of the role's core, and the answers to them."""

from __future__ import annotations

from typing import Any

from orchestrator.cluster.desk import Mailbox
from orchestrator.cluster.messages import Did, Do
from orchestrator.engine.request import Event
from orchestrator.roles.engine_port import DecodeDone, PrefillDone, RunDecode, RunPrefill
from orchestrator.service.ep.rank_port import RankPort


class RankDesk:
    """`cluster.desk.Requests` of a rank behind a role.

    Whether there is work decides whether the group steps, so `RunPrefill` and `RunDecode` start nothing: they are
    answered once steps have brought what they ask for.
    """

    def __init__(self, port: RankPort, mailbox: Mailbox) -> None:
        self.port, self.mailbox, self.layout = port, mailbox, port.layout
        self._group = 0
        self._prefill: RunPrefill | None = None
        self._decode: RunDecode | None = None
        self._since = 0  # steps before the group was asked to decode
        self._said = (0, 0)  # of requests and blocks, last

    def take(self, message: Do) -> None:
        """Carry a command out; one of an earlier group is left out."""
        if message.group < self._group:
            return
        if message.group > self._group:
            self._group, self._prefill, self._decode = message.group, None, None
            self.port.answers()
        command = message.command
        if isinstance(command, RunPrefill):
            self._prefill = command
        elif isinstance(command, RunDecode):
            self._decode, self._since = command, self.port.engine.forwards
        else:
            self.port.do(command)
        self._answer()

    def tell(self, events: list[Event]) -> None:
        self.port.note(events)
        self._answer()

    def _answer(self) -> None:
        answers: list[Any] = list(self.port.answers())
        if self._prefill is not None and self.port.is_computed(self._prefill):
            answers.append(PrefillDone(self._prefill.step, 0.0, ahead=self.port.ahead(self._prefill)))
            self._prefill = None
        if self._decode is not None and self._is_decoded(self._decode):
            answers.append(DecodeDone(self._decode.step, tuple(self.port.outputs(self._decode))))
            self._decode = None
        engine = self.port.engine
        queues = engine.scheduler
        held = (
            sum(map(len, (queues.waiting, queues.parked, queues.running, queues.leaving))),
            queues.blocks.used,
        )
        # Blocks of a dropped request are free once the step in flight has ended, without any command.
        if answers or (held != self._said and not engine.has_work):
            self._said = held
            self.mailbox.send(Did(self._group, tuple(answers), engine.forwards, *held))

    def _is_decoded(self, run: RunDecode) -> bool:
        """Whether there is something to tell, a step has been, or none will be."""
        if self.port.engine.forwards > self._since or not self.port.is_stepping(run):
            return True
        return self.port.has_outputs(run)
