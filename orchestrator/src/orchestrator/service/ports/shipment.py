"""One request's state on its way out: parts go to the sender as they come, and stay there until the target has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from orchestrator.cache.block_object import Buffer
from orchestrator.engine.handoff.outgoing import Outgoing
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.roles.state_parts import KINDS
from orchestrator.service.ports.tickets import Announced, Ticket, pack
from orchestrator.transfer import Offered, TransferFailed


class Shipment:
    """All methods belong to the engine's thread and never wait: the sender has room for a whole state.

    Args:
        kind: of a part by its name.

    Attributes:
        size: bytes so far. ahead: of them before `finish`; taken_ahead: of these, that the target had by then.
        finished_at: clock of `finish`; 0 before.
    """

    def __init__(self, leaving: Outgoing, offered: Offered, ticket: Ticket, kind: Callable[[str], str]) -> None:
        self.leaving: Outgoing | None = leaving
        self.offered, self.ticket, self._kind = offered, pack(ticket), kind
        self.size = self.ahead = self.taken_ahead = 0
        self.finished_at = 0.0
        self.failed = ""
        self._kinds = dict[str, list[int]]((each, [0, 0]) for each in KINDS)

    @property
    def alive(self) -> bool:
        """Whether all that was made so far is on its way."""
        return not self.failed and self.offered.outcome is None

    def collect(self) -> None:
        """Send what a step has made."""
        if self.leaving is not None and not self.finished_at and self.alive:
            try:
                self.leaving.collect()
            except HandoffRefused as error:  # the request has ended
                self.cancel(str(error))
                return
            self.push(self.leaving.take())

    def push(self, parts: Iterable[tuple[str, Buffer]]) -> None:
        if not self.alive:
            return
        for name, data in parts:
            size = memoryview(data).nbytes
            try:
                self.offered.put(name, data, timeout=0.0)
            except (TransferFailed, TimeoutError, ValueError) as error:
                self.cancel(str(error))
                return
            self.size += size
            held = self._kinds[self._kind(name)]
            held[0], held[1] = held[0] + 1, held[1] + size

    def finish(self, *, ahead: bool) -> None:
        """Stop the request and send the rest; `ahead`: parts could go before. Raises HandoffRefused if it has ended."""
        assert self.leaving is not None
        self.push(self.leaving.take())
        if ahead:
            self.ahead, self.taken_ahead = self.size, self.size - self.offered.held
        self.leaving.close()
        self.push(self.leaving.take())
        self.offered.finish()
        self.leaving, self.finished_at = None, time.monotonic()

    def announced(self) -> dict[str, bytes]:
        """By kind, what stands for its bytes in the roles' manifest; empty where there are none."""
        return {
            kind: pack(Announced(self.ticket, parts, size)) if parts else b""
            for kind, (parts, size) in self._kinds.items()
        }

    def cancel(self, why: str) -> None:
        """Free what is offered; nothing to do where it has ended."""
        if self.offered.cancel(why) and not self.failed:
            self.failed = why
        elif not self.failed and self.offered.outcome is not None and not self.offered.outcome.good:
            self.failed = self.offered.outcome.reason
