"""Links within one process: messages and parts go by reference."""

from __future__ import annotations

import threading
from collections import deque

from orchestrator.transfer import frames
from orchestrator.transfer.errors import LinkBroken
from orchestrator.transfer.link import Link, Room, Tick, nothing

_WAITING = 64  # messages, and links that nobody has accepted; what parts may wait is for the window to say


class _Queue:
    def __init__(self) -> None:
        self.changed, self.items, self.closed = threading.Condition(), deque[tuple[frames.Any, bytes]](), False


class LocalLink:
    """One end of two queues."""

    def __init__(self, out: _Queue, into: _Queue) -> None:
        self._out, self._into = out, into

    def send(self, message: frames.Any, payload: bytes = b"", *, stall: float) -> None:
        queue = self._out
        with queue.changed:
            if not queue.changed.wait_for(lambda: queue.closed or len(queue.items) < _WAITING, stall):
                raise LinkBroken(f"the other side took no message for {stall} s")
            if queue.closed:
                raise LinkBroken("the link is closed")
            queue.items.append((message, payload))
            queue.changed.notify_all()

    def receive(
        self, timeout: float, room: Room, *, stall: float, tick: Tick = nothing
    ) -> tuple[frames.Any, bytes | bytearray] | None:
        queue = self._into
        with queue.changed:
            queue.changed.wait_for(lambda: queue.closed or queue.items, timeout)
            if not queue.items:
                if queue.closed:
                    raise LinkBroken("the link is closed")
                return None
            message, payload = queue.items.popleft()
            queue.changed.notify_all()
        if len(payload) > (allowed := room()):
            raise LinkBroken(f"payload: got {len(payload)} bytes, allowed are {allowed}", "size")
        return message, payload

    def stop(self) -> None:
        for queue in (self._out, self._into):
            with queue.changed:
                queue.closed = True
                queue.changed.notify_all()

    def close(self) -> None:
        self.stop()


class LocalListener:
    """`dial` makes links to whoever accepts them."""

    def __init__(self) -> None:
        self._changed, self._links, self._closed = threading.Condition(), deque[LocalLink](), False

    def dial(self, timeout: float) -> Link:
        there, back = _Queue(), _Queue()
        with self._changed:
            if self._closed or len(self._links) >= _WAITING:
                raise LinkBroken("nobody accepts links here")
            self._links.append(LocalLink(back, there))
            self._changed.notify_all()
        return LocalLink(there, back)

    def accept(self, timeout: float) -> Link | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._links, timeout)
            if self._closed:
                raise LinkBroken("the listener is closed")
            return self._links.popleft() if self._links else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for link in self._links:
                link.close()
            self._links.clear()
            self._changed.notify_all()
