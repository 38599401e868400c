"""Links whose parts are read by Mooncake's transfer engine out of the sender's memory, over RDMA or its own TCP.

Messages go over a TCP stream as ever. A part goes by chunks of registered memory:

    sender                                    receiver
    copies bytes into a chunk, Staged    ->   reads them into a chunk of its own, and out of it
    Kept, then the chunk is used again   <-   Copied

The receiver uses no bytes before it is told that they lay there unchanged until it had read them. A sender that has
given a link up never says so: whoever reads on later gets a broken link, and not what lies there by then. Nobody
writes into another process's memory.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import deque

from orchestrator.transfer import frames
from orchestrator.transfer.chunks import Chunk
from orchestrator.transfer.errors import LinkBroken
from orchestrator.transfer.link import Link, Room, Stream, StreamLink, Tick, nothing
from orchestrator.transfer.mooncake_engine import load
from orchestrator.transfer.mooncake_mover import Mover, mover_of
from orchestrator.transfer.tcp import TcpListener, stream_of

_AHEAD = 2  # chunks of a link: one is filled while the other one is read
_NAME = re.compile(r"[\w.-]{1,255}:\d{1,5}", re.ASCII)


class MooncakeLink(StreamLink):
    """As a `StreamLink`, with payloads beside the stream."""

    def __init__(self, stream: Stream, mover: Mover) -> None:
        super().__init__(stream)
        self._mover, self._changed, self._stopped = mover, threading.Condition(), False
        self._staged = self._copied = self._read = 0  # chunks of this link in all; the last at the receiver

    # Sender

    def _send_payload(self, head: bytes, payload: bytes, stall: float) -> None:
        view, staging, engine = memoryview(payload), self._mover.staging, self._mover.engine
        empty: Chunk | None = self._first(stall)
        given = deque[Chunk]()
        try:
            self._write(head, stall)
            while view or given:
                if view and empty is None and len(given) < _AHEAD:
                    empty = staging.take(0)
                if view and empty is not None:
                    size = min(len(view), staging.size)
                    empty.view[:size] = view[:size]
                    view = view[size:]
                    given.append(empty)
                    staged = frames.Staged(engine.name, engine.life, empty.address, size)
                    empty = None
                    self._staged += 1
                    self._write(frames.pack(staged, 0), stall)
                else:
                    count = self._staged - len(given) + 1
                    self._wait_copied(count, stall)
                    self._write(frames.pack(frames.Kept(count), 0), stall)
                    if empty is not None:
                        staging.give(empty)
                    empty = given.popleft()
        finally:
            for chunk in given if empty is None else [empty, *given]:
                staging.give(chunk)

    def _first(self, stall: float) -> Chunk:
        """Memory to begin with, which it has until its end: who has begun always gets on. Says so while it waits."""
        while (chunk := self._mover.staging.take(stall / 4)) is None:
            if self._stopped:
                raise LinkBroken("the link is closed")
            self._write(frames.pack(frames.Alive(), 0), stall)
        return chunk

    def _wait_copied(self, count: int, stall: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._stopped or self._copied >= count, stall):
                raise LinkBroken(f"the receiver has read nothing for {stall} s")
            if self._copied < count:
                raise LinkBroken("the link is closed")

    def receive(
        self, timeout: float, room: Room, *, stall: float, tick: Tick = nothing
    ) -> tuple[frames.Any, bytes | bytearray] | None:
        until = time.monotonic() + timeout
        while True:
            got = super().receive(max(0.0, until - time.monotonic()), room, stall=stall, tick=tick)
            if got is None or not isinstance(got[0], frames.Copied):
                return got
            with self._changed:
                if not self._copied < got[0].count <= self._staged:
                    allowed = f"{self._copied + 1} to {self._staged}"
                    raise LinkBroken(f"copied: got {got[0].count}, allowed are {allowed}", "message")
                self._copied = got[0].count
                self._changed.notify_all()

    # Receiver

    def _receive_payload(self, view: memoryview, stall: float, tick: Tick) -> None:
        sizes, at = deque[int](), 0
        while at < len(view) or sizes:
            head = self._head(stall, stall)
            if head is None:
                raise LinkBroken(f"no word of a part that had begun for {stall} s")
            message = head[0]
            if isinstance(message, frames.Staged):
                most = min(len(view) - at, self._mover.landing.size)
                if not 0 < message.size <= most:
                    raise LinkBroken(f"staged: got {message.size} bytes, allowed are 1 to {most}", "size")
                self._copy(message, view[at : at + message.size], stall)
                at += message.size
                sizes.append(message.size)
                self._read += 1
                self.send(frames.Copied(self._read), stall=stall)
                tick()
            elif isinstance(message, frames.Kept) and sizes and message.count == self._read - len(sizes) + 1:
                sizes.popleft()
            else:
                raise LinkBroken(f"got {message}, which a sender does not say within a part", "message")

    def _copy(self, staged: frames.Staged, into: memoryview, stall: float) -> None:
        if not _NAME.fullmatch(staged.segment) or not 0 < staged.address < 1 << 63:
            raise LinkBroken(f"staged: got {staged.segment!r} at {staged.address}", "message")
        self._mover.read(staged.segment, staged.life, staged.address, into, stall)

    # Both

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        super().stop()

    def close(self) -> None:
        self.stop()
        super().close()


class MooncakeListener(TcpListener):
    """As `TcpListener`; `address` is what to dial with `dial_mooncake`.

    Args:
        host: by which receivers reach this machine; also for the engine, which listens at ports of its own.
        protocol: "tcp", or "rdma" where there are cards for it. devices: their names, with commas; empty for all.

    Raises:
        TransferUnavailable: the library is not here.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, protocol: str = "tcp", devices: str = "") -> None:
        mover = mover_of(host, protocol, devices)
        super().__init__(host, port, link=lambda stream: MooncakeLink(stream, mover))


def dial_mooncake(host: str, port: int, timeout: float, *, protocol: str = "tcp", devices: str = "") -> Link:
    """Raises OSError where nobody answers in time; TransferUnavailable."""
    load()
    connected = socket.create_connection((host, port), max(timeout, 0.001))
    try:
        return MooncakeLink(stream_of(connected), mover_of(connected.getsockname()[0], protocol, devices))
    except BaseException:
        connected.close()
        raise
