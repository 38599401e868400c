"""One connection between a sender and a receiver, whatever it runs over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from orchestrator.transfer import frames
from orchestrator.transfer.errors import LinkBroken

Room = Callable[[], int]
Tick = Callable[[], None]


def nothing() -> None: ...


class Link(Protocol):
    """For two threads, one of which receives. All calls raise LinkBroken once the link is of no more use."""

    def send(self, message: frames.Any, payload: bytes = b"", *, stall: float) -> None:
        """Waits `stall` seconds at most for the other side to make room for the next byte."""

    def receive(
        self, timeout: float, room: Room, *, stall: float, tick: Tick = nothing
    ) -> tuple[frames.Any, bytes | bytearray] | None:
        """The next message; None if none begins within `timeout`.

        `room()` is the most bytes that it may bring; `tick()` is called whenever some of them have come.
        """

    def stop(self) -> None:
        """Ends all waiting here and tells the other side. By any thread, as often as one likes."""

    def close(self) -> None:
        """`stop`, and free what it holds. Once no other thread is in a call."""


class Listener(Protocol):
    """Where receivers dial to."""

    def accept(self, timeout: float) -> Link | None:
        """A new link; None after `timeout`. Raises LinkBroken once closed."""

    def close(self) -> None: ...


Dial = Callable[[float], Link]
"""Makes a new link to a sender within so many seconds, or raises OSError."""


class Stream(Protocol):
    """Bytes in both directions. Raises LinkBroken at their end."""

    def read_into(self, view: memoryview, timeout: float) -> int:
        """How many bytes came, at most `len(view)`; 0 after `timeout`."""

    def write(self, view: memoryview, timeout: float) -> int:
        """How many bytes went, at most `len(view)`; 0 after `timeout`."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


class StreamLink:
    """A `Link` over a `Stream`. One that moves payloads beside it has its own `_send_payload`, `_receive_payload`."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._sending = stream, threading.Lock()
        self._broken = False

    def send(self, message: frames.Any, payload: bytes = b"", *, stall: float) -> None:
        head = frames.pack(message, len(payload))
        with self._sending:
            if self._broken:
                raise LinkBroken("an earlier message was not sent whole")
            self._broken = True
            if payload:
                self._send_payload(head, payload, stall)
            else:
                self._write(head, stall)
            self._broken = False

    def _send_payload(self, head: bytes, payload: bytes, stall: float) -> None:
        """A message and its payload. `_sending` is held."""
        self._write(head, stall)
        self._write(payload, stall)

    def _write(self, data: bytes, stall: float) -> None:
        view = memoryview(data)
        while view:
            done = self._stream.write(view, stall)
            if not done:
                raise LinkBroken(f"the other side took no byte for {stall} s")
            view = view[done:]

    def receive(
        self, timeout: float, room: Room, *, stall: float, tick: Tick = nothing
    ) -> tuple[frames.Any, bytes | bytearray] | None:
        head = self._head(timeout, stall)
        if head is None:
            return None
        message, payload_bytes = head
        if payload_bytes > (allowed := room()):
            raise LinkBroken(f"payload: got {payload_bytes} bytes, allowed are {allowed}", "size")
        payload = bytearray(payload_bytes)
        if payload_bytes:
            self._receive_payload(memoryview(payload), stall, tick)
        return message, payload

    def _head(self, timeout: float, stall: float) -> tuple[frames.Any, int] | None:
        """The next message and the bytes of its payload."""
        prefix = bytearray(frames.PREFIX.size)
        first = self._stream.read_into(memoryview(prefix), timeout)
        if not first:
            return None
        self._fill(memoryview(prefix)[first:], stall)
        size, payload_bytes, crc = frames.lengths_of(bytes(prefix))
        body = bytearray(size)
        self._fill(memoryview(body), stall)
        return frames.unpack(bytes(body), payload_bytes, crc), payload_bytes

    def _receive_payload(self, view: memoryview, stall: float, tick: Tick) -> None:
        self._fill(view, stall, tick)

    def _fill(self, view: memoryview, stall: float, tick: Tick = nothing) -> None:
        while view:
            done = self._stream.read_into(view, stall)
            if not done:
                raise LinkBroken(f"no byte of a message that had begun for {stall} s")
            view = view[done:]
            tick()

    def stop(self) -> None:
        self._stream.stop()

    def close(self) -> None:
        self._stream.close()
