"""The engine's side of the wire: a socket to the I/O process, or the same work done at once in this process."""

from __future__ import annotations

import abc
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.host.table import HostTable
from orchestrator.cache.io import events as ev
from orchestrator.cache.io import jobs
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.core import IoCore
from orchestrator.cache.store.base import Store

_CONNECT_S = 0.25


class LinkLost(ConnectionError):
    """The I/O process is gone."""


class Link(abc.ABC):
    """Carries requests out and hands answers to `on_answer`; `on_lost` is called once when no more can come."""

    on_answer: Callable[[m.Message], None]
    on_lost: Callable[[], None]

    @abc.abstractmethod
    def send(self, message: m.Message) -> None:
        """Raises `LinkLost`."""

    @abc.abstractmethod
    def close(self) -> None: ...


class SocketLink(Link):
    """To an I/O process. Answers come on a thread of the link, after `start`. Raises OSError where nobody listens."""

    def __init__(self, path: Path, on_answer: Callable[[m.Message], None], on_lost: Callable[[], None]) -> None:
        self.on_answer, self.on_lost = on_answer, on_lost
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_CONNECT_S)  # one that hangs and has a full queue would block for ever
            self._socket.connect(str(path))
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise
        # A process that hangs must not make an engine hang that tells it something.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 250_000))
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to take answers; `on_lost` may be called from now on."""
        threading.Thread(target=self._receive, name="kv-link", daemon=True).start()

    def send(self, message: m.Message) -> None:
        try:
            with self._lock:
                m.send(self._socket, message)
        except OSError as error:
            self.close()  # half a message may be on its way: nothing can follow it
            raise LinkLost("the I/O process is gone, or hangs") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        inbox = m.Inbox(answers=True)
        try:
            with contextlib.suppress(OSError, ValueError):
                while data := self._socket.recv(1 << 20):
                    for message in inbox.feed(data):
                        self.on_answer(message)
        finally:
            self.close()
            self.on_lost()


class InlineLink(Link):
    """Without a second process: every request is done before `send` returns. For tests and small installations."""

    def __init__(self, store: Store, arena: HostArena, *, max_filling: int | None = None) -> None:
        self.store, self.arena = store, arena
        table = HostTable(arena.slots)
        table.adopt((slot, header.key, header.generation) for slot, header in arena.survey())
        self.core = IoCore(table, max_filling or max(1, arena.slots // 4))
        self._calls = jobs.StoreCalls(store)
        self._lock = threading.RLock()

    def send(self, message: m.Message) -> None:
        with self._lock:
            self._do(ev.Got(1, message))

    def close(self) -> None:
        with self._lock:
            self._do(ev.Left(1))
            self._calls.left(1)

    def _do(self, event: ev.Event) -> None:
        for action in self.core.step(event, time.monotonic()):
            match action:
                case ev.Send(_, message):
                    self.on_answer(message)
                case ev.Load():
                    for items in jobs.runs(action):
                        for loaded in jobs.load_blocks(self.store, self.arena, items):
                            self._do(loaded)
                case ev.Probe():
                    self._do(jobs.probe(self.store, action))
                case ev.Persist():
                    self._do(jobs.persist(self.store, self.arena, action))
                case ev.StoreCall():
                    for send in self._calls.do(action):
                        self.on_answer(send.message)
