"""The requests of one worker: what the supervisor asks of its engine, and what the engine says of them."""

from __future__ import annotations

from typing import Any, Protocol

from orchestrator.cluster.messages import Abort, Refused, Submit, Told
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import EngineFull, Event, Finished, TokenOutput


class Mailbox(Protocol):
    """One end of a line to the supervisor, as `multiprocessing.connection.Connection`."""

    def send(self, message: Any) -> None: ...

    def poll(self, timeout: float | None = 0.0) -> bool: ...

    def recv(self) -> Any: ...


class Requests(Protocol):
    """What a worker has its requests with. Outlives epochs, as the requests do.

    Attributes:
        layout: see `Up`.
    """

    layout: str

    def take(self, message: Any) -> None:
        """Do what the supervisor asks, between two steps."""

    def tell(self, events: list[Event]) -> None:
        """Pass on what happened; called behind every step, and in every turn without one."""


class Desk:
    """Outlives epochs, as the requests do: a worker that goes on in the next one has all that it had."""

    layout = ""

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self.engine, self.mailbox = engine, mailbox
        self._index: dict[str, int] = {}  # of each request's next token

    def take(self, message: Submit | Abort) -> None:
        """Do what the supervisor asks. A request that cannot run is refused with a message."""
        if isinstance(message, Abort):
            self.engine.abort(message.request_id)
            return
        try:
            self.engine.add(message.request_id, list(message.prompt), message.params, generated=message.generated)
        except (ValueError, EngineFull) as error:
            self.mailbox.send(Refused(message.request_id, str(error)))
            return
        self._index[message.request_id] = len(message.generated)

    def tell(self, events: list[Event]) -> None:
        """Pass on what happened, each token with its number in its request's output."""
        if not events:
            return
        told = []
        for event in events:
            index = -1
            if isinstance(event, TokenOutput):
                index = self._index[event.request_id]
                self._index[event.request_id] = index + 1
            elif isinstance(event, Finished):
                del self._index[event.request_id]
            told.append((index, event))
        self.mailbox.send(Told(tuple(told)))
