"""The thread that drives an `Entry` core: messages and clients' wishes in, messages and deliveries out."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from orchestrator.roles.entry import Entry
from orchestrator.roles.messages import (
    Accepted,
    ClientCancel,
    ClientRequest,
    Deliver,
    DeliverEnd,
    DeliverReady,
    Landed,
    Lost,
    Refused,
    Released,
    RequestSpec,
    Send,
    Start,
    Tick,
    Tokens,
    Unknown,
    Wake,
    WorkFailed,
)
from orchestrator.service.messages import Pixels, WantPixels

log = logging.getLogger("orchestrator.service")
Delivery = DeliverReady | Deliver | DeliverEnd

_FOR_ENTRY = (Accepted, Landed, Lost, Refused, Released, Tokens, Unknown, WantPixels, WorkFailed)
_MOST = 100_000  # messages that wait for the core; further ones are dropped, their senders repeat them
_CLOSE = object()


class Sender(Protocol):
    """What is used of a `Post`."""

    def send(self, to: str, message: Any) -> bool: ...


class EntryLoop:
    """Only the loop's thread touches the core while it runs.

    Args:
        deliver: is given what there is for clients, in order, once a turn and in the loop's thread.
        pixels: the encoded image of a digest, empty if it is not there any more.
        failed: is told why, if the loop ends otherwise than by `close`.
        most: messages that wait for the core at most.

    Attributes:
        counts: messages that were dropped, by reason.
    """

    def __init__(
        self,
        entry: Entry,
        post: Sender,
        *,
        deliver: Callable[[list[Delivery]], None],
        pixels: Callable[[str], bytes],
        failed: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        most: int = _MOST,
    ) -> None:
        self.entry, self.counts = entry, Counter[str]()
        self._post, self._deliver, self._pixels, self._failed = post, deliver, pixels, failed
        self._clock, self._most = clock, most
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._wake: float | None = None
        self._deliveries: list[Delivery] = []
        self._thread = threading.Thread(target=self._run, name="entry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # From any thread

    def take(self, message: Any) -> None:
        """A message that came for the entry. Never waits; what it has no use or no room for is dropped and counted."""
        if not isinstance(message, _FOR_ENTRY):
            self._drop(f"{type(message).__name__} is for another party")
        elif self._events.qsize() >= self._most:
            self._drop("too many wait")
        else:
            self._events.put(message)

    def request(self, name: str, spec: RequestSpec) -> None:
        self._events.put(ClientRequest(name, spec))

    def cancel(self, name: str) -> None:
        self._events.put(ClientCancel(name))

    def close(self, timeout: float) -> bool:
        """Have the thread end behind all that it was asked for before; whether it did within `timeout` seconds."""
        self._events.put(_CLOSE)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # In the loop's thread

    def _run(self) -> None:
        try:
            self._step(Start())
            while self._turn():
                pass
        except Exception as error:  # whatever ends the loop is told to everybody who waits for it
            log.exception("the entry stopped")
            self._failed(f"{type(error).__name__}: {error}")

    def _turn(self) -> bool:
        """Wait for events, handle all that are there, then the tick; False when it is time to stop.

        Messages come first, so that after a pause of this process no worker counts as silent whose word is here.
        """
        wait = None if self._wake is None else max(0.0, self._wake - self._clock())
        going = True
        try:
            event = self._events.get(timeout=wait)
            for left in range(self._events.qsize(), -1, -1):
                going = going and event is not _CLOSE
                if event is not _CLOSE:
                    self._handle(event)
                if left:
                    event = self._events.get_nowait()
        except Empty:
            pass
        if self._wake is not None and self._clock() >= self._wake:
            self._wake = None
            self._step(Tick())
        if self._deliveries:
            made, self._deliveries = self._deliveries, []
            self._deliver(made)
        return going

    def _handle(self, event: Any) -> None:
        if isinstance(event, WantPixels):
            self._post.send(event.encoder, Pixels(event.digest, self._pixels(event.digest)))
        else:
            self._step(event)

    def _step(self, event: Any) -> None:
        for action in self.entry.step(event, self._clock()):
            if isinstance(action, Send):
                self._post.send(action.to, action.message)
            elif isinstance(action, Wake):
                self._wake = action.at
            else:
                self._deliveries.append(action)

    def _drop(self, why: str) -> None:
        if not self.counts[why]:
            log.warning("message to the entry dropped: %s", why)
        self.counts[why] += 1
