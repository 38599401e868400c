"""Links over TCP."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable

from orchestrator.transfer.errors import LinkBroken
from orchestrator.transfer.link import Link, StreamLink

MakeLink = Callable[["SocketStream"], Link]
_PAUSE = 0.02  # seconds before a listener that has just failed is asked again


class SocketStream:
    """A `Stream` over a connected socket, which is its own from now on."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected

    def read_into(self, view: memoryview, timeout: float) -> int:
        if not wait_for(self._socket, select.POLLIN, timeout):
            return 0
        try:
            done = self._socket.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkBroken(f"socket: {error}") from None
        if not done:
            raise LinkBroken("the other side has closed the link")
        return done

    def write(self, view: memoryview, timeout: float) -> int:
        if not wait_for(self._socket, select.POLLOUT, timeout):
            return 0
        try:
            return self._socket.send(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkBroken(f"socket: {error}") from None

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop()
        self._socket.close()


def wait_for(waiting: socket.socket, event: int, timeout: float) -> bool:
    """Whether the socket can read or write (`select.POLLIN`, `select.POLLOUT`), or has an error, within `timeout`."""
    number = waiting.fileno()
    if number < 0:
        raise LinkBroken("the link is closed")
    poll = select.poll()
    poll.register(number, event)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def dial_tcp(host: str, port: int, timeout: float) -> Link:
    """Raises OSError where nobody answers in time."""
    return StreamLink(stream_of(socket.create_connection((host, port), max(timeout, 0.001))))


class TcpListener:
    """Listens at a host's port; port 0 takes any that is free. `address` is what to dial.

    `link` makes a link of each connection. Whoever can reach it can ask for a handoff whose random id it knows: it
    belongs into a trusted network.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, link: MakeLink = StreamLink) -> None:
        self._make = link
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self._socket.setblocking(False)
        self._closed = False
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self, timeout: float) -> Link | None:
        if self._closed or not wait_for(self._socket, select.POLLIN, timeout):
            if self._closed:
                raise LinkBroken("the listener is closed")
            return None
        try:
            return self._make(stream_of(self._socket.accept()[0]))
        except BlockingIOError:
            return None
        except OSError:  # too many open files, or closed: the next call tells
            time.sleep(_PAUSE)
            return None

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits
        self._socket.close()


def stream_of(connected: socket.socket) -> SocketStream:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketStream(connected)
