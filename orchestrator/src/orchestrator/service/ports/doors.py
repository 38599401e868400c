"""Where a worker's states can be fetched, and how another worker's are: the links that the config allows."""

from __future__ import annotations

import functools
import queue
import secrets
import threading
from typing import Any

from orchestrator.service.config import LinkKind
from orchestrator.service.ports.tickets import Ticket
from orchestrator.transfer import (
    Limits,
    LinkBroken,
    LocalListener,
    Sender,
    SharedListener,
    TcpListener,
    Times,
    dial_shared,
    dial_tcp,
)
from orchestrator.transfer.link import Dial, Link, Listener

_BEAT = 0.5  # seconds
_WAITING = 64  # links that nobody has accepted
_local: dict[str, LocalListener] = {}  # of this process, by the name in a ticket


class Doors:
    """A sender that listens on each allowed kind of link, and dials for tickets of others. "auto": shared, and TCP."""

    def __init__(self, kind: LinkKind, host: str, node: str, limits: Limits, times: Times) -> None:
        self._kind, self._node, self._limits, self._times = kind, node, limits, times
        self._shared, self._tcp, self._other = "", ("", 0), ""
        listeners: list[Listener] = []
        try:
            if kind in ("auto", "shared"):
                shared = SharedListener()
                listeners.append(shared)
                self._shared = shared.address
            if kind in ("auto", "tcp"):
                tcp = TcpListener(host, 0)
                listeners.append(tcp)
                self._tcp = tcp.address
            if kind == "local":
                self._other = secrets.token_hex(8)
                local = _local[self._other] = LocalListener()
                listeners.append(local)
            if kind == "mooncake":
                from orchestrator.transfer.mooncake import MooncakeListener  # has to be installed

                mooncake = MooncakeListener(host)
                listeners.append(mooncake)
                self._tcp = mooncake.address
        except BaseException:
            for each in listeners:
                each.close()
            raise
        self.sender = Sender(listeners[0] if len(listeners) == 1 else _Several(listeners), limits, times)

    def ticket(self, handoff: bytes, epoch: int, form: Any) -> Ticket:
        return Ticket(self._node, self._shared, *self._tcp, self._other, handoff, epoch, form)

    def dial(self, ticket: Ticket) -> Dial:
        """How to reach the sender of a ticket. Raises ValueError where no allowed kind of link leads there."""
        kind = self._kind
        if kind == "local" and ticket.other:
            return functools.partial(_dial_local, ticket.other)
        if kind == "mooncake" and ticket.port:
            from orchestrator.transfer.mooncake import dial_mooncake

            return functools.partial(dial_mooncake, ticket.host, ticket.port)
        if kind in ("auto", "shared") and ticket.shared and ticket.node == self._node:
            return functools.partial(dial_shared, ticket.shared)
        if kind in ("auto", "tcp") and ticket.port:
            return functools.partial(dial_tcp, ticket.host, ticket.port)
        raise ValueError(f"ticket: from node {ticket.node!r}, no link of kind {kind!r} leads there from {self._node!r}")

    def close(self) -> None:
        self.sender.close()
        _local.pop(self._other, None)


def _dial_local(name: str, timeout: float) -> Link:
    listener = _local.get(name)
    if listener is None:
        raise LinkBroken("nobody of that name listens in this process")
    return listener.dial(timeout)


class _Several:
    """Listeners as one: a thread waits at each."""

    def __init__(self, listeners: list[Listener]) -> None:
        self._listeners, self._closed = listeners, False
        self._links: queue.Queue[Link] = queue.Queue(_WAITING)
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="transfer listener", daemon=True)
            for each in listeners
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, listener: Listener) -> None:
        while not self._closed:
            try:
                link = listener.accept(_BEAT)
            except LinkBroken:
                return
            if link is None:
                continue
            try:
                self._links.put(link, timeout=_BEAT)
            except queue.Full:
                link.close()  # the receiver dials again

    def accept(self, timeout: float) -> Link | None:
        if self._closed:
            raise LinkBroken("the listener is closed")
        try:
            return self._links.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(2 * _BEAT)
        while not self._links.empty():
            self._links.get_nowait().close()
