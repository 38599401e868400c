"""The readers of open requests: who they are, what has come for them, and how many wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.engine.request import EngineFull
from orchestrator.roles.messages import DeliverEnd, DeliverReady, RequestSpec
from orchestrator.service.front.entry_loop import Delivery

Item = Delivery | Exception


@dataclass(eq=False)
class Stream:
    """One reader.

    Attributes:
        request_id: the client's. name: of the request among the roles.
        queue: what its reader has not taken yet; no more than the request's output, so that nobody waits for it.
        sent: the entry has the request. ready: its first token has come. ended: nothing more comes from the entry.
        aborted: by id.
    """

    request_id: str
    name: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    sent: bool = False
    ready: bool = False
    ended: bool = False
    aborted: bool = False


class Streams:
    """Readers and the entry's thread meet here. Thread-safe.

    Args:
        request, cancel: hand a request to the entry, and have it end there; they return at once.

    Attributes:
        running, waiting: requests with and without a first token. steps: times that something was delivered.
        last: when that was, or when the first request came after a time without any (`time.monotonic`).
    """

    def __init__(self, request: Callable[[str, RequestSpec], None], cancel: Callable[[str], None]) -> None:
        self._request, self._cancel = request, cancel
        self._lock = threading.Lock()
        self._open: dict[str, Stream] = {}  # by the client's id, until the reader has left
        self._live: dict[str, Stream] = {}  # by the roles' name, until the request has ended
        self._closed = ""  # why nobody may enter any more
        self.running, self.steps, self.last = 0, 0, time.monotonic()

    @property
    def waiting(self) -> int:
        return len(self._live) - self.running

    @property
    def live(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    @property
    def idle(self) -> bool:
        """Whether every reader has left."""
        return not self._open

    # Readers

    def enter(self, request_id: str, name: str, limit: int) -> Stream:
        """Raises ValueError for an id in use, EngineFull where `limit` requests wait, RuntimeError after `end`."""
        with self._lock:
            if self._closed:
                raise RuntimeError(self._closed)
            if request_id in self._open:
                raise ValueError(f"request_id: got {request_id!r}, which is running; ids have to be unique")
            if self.waiting >= limit:
                raise EngineFull(f"{limit} requests are waiting already; try again later")
            if not self._live:
                self.last = time.monotonic()
            stream = Stream(request_id, name, asyncio.get_running_loop())
            self._open[request_id] = self._live[name] = stream
            return stream

    def submit(self, stream: Stream, spec: RequestSpec) -> bool:
        """Hand a request to the entry; False if it was aborted before. One that was ended has its error already."""
        with self._lock:
            if stream.aborted:
                self._forget(stream)
                return False
            if not stream.ended:
                stream.sent = True
                self._request(stream.name, spec)
            return True

    def abort(self, request_id: str) -> None:
        with self._lock:
            stream = self._open.get(request_id)
            if stream is not None:
                stream.aborted = True
                if stream.sent and not stream.ended:
                    self._cancel(stream.name)

    def leave(self, stream: Stream) -> None:
        """The reader is gone: so is the request, unless it has ended."""
        with self._lock:
            if stream.sent and not stream.ended:
                self._cancel(stream.name)
            self._forget(stream)
            if self._open.get(stream.request_id) is stream:
                del self._open[stream.request_id]

    # The entry

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Pass on what has come; what comes for nobody is dropped."""
        items: list[tuple[Stream, Item]] = []
        with self._lock:
            for delivery in deliveries:
                stream = self._live.get(delivery.request)
                if stream is None:
                    continue
                items.append((stream, delivery))
                if isinstance(delivery, DeliverReady):
                    stream.ready = True
                    self.running += 1
                elif isinstance(delivery, DeliverEnd):
                    self._forget(stream)
            if items:
                self.steps, self.last = self.steps + 1, time.monotonic()
        self._put(items)

    def end(self, why: str) -> None:
        """For good: every reader gets an error, and the entry is asked to end their requests."""
        with self._lock:
            self._closed = why
            streams = list(self._live.values())
            for stream in streams:
                if stream.sent:
                    self._cancel(stream.name)
                self._forget(stream)
        self._put([(stream, RuntimeError(why)) for stream in streams])

    def _forget(self, stream: Stream) -> None:
        """Count a request no more. Under the lock."""
        stream.ended = True
        if self._live.pop(stream.name, None) is not None and stream.ready:
            self.running -= 1

    def _put(self, items: list[tuple[Stream, Item]]) -> None:
        """Fill the readers' queues, with one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}
        for stream, item in items:
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, mine in by_loop.items():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_fill, mine)
                continue
            for stream, _ in mine:  # the readers' event loop is closed: none of them comes back
                self.leave(stream)


def _fill(items: list[tuple[Stream, Item]]) -> None:
    for stream, item in items:
        stream.queue.put_nowait(item)
