"""The main loop of a worker process: one core between the post, an engine and the clock."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.roles.core import Core
from orchestrator.roles.engine_port import EnginePort, is_command
from orchestrator.roles.messages import Drain, Exit, Send, Start, Tick, Wake
from orchestrator.roles.router import Router
from orchestrator.roles.worker import Worker
from orchestrator.service.messages import Book, Hello, Leave, Pixels, WorkerSpec
from orchestrator.service.post.post import Post
from orchestrator.service.process.engine_thread import EngineThread
from orchestrator.service.process.events import ShellEvents
from orchestrator.service.process.memory import resident_bytes

SUPERVISOR = "supervisor"
FLUSH = 2.0  # seconds that the last messages have
_CATCH_UP = 0.1  # seconds in which the post reads what waits
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leaving:
    """Notice: drain with this grace in seconds, below 0: end now."""

    grace: float


@dataclass(frozen=True)
class Broken:
    """Notice: the engine cannot be used any more."""

    why: str


class Shell:
    """Runs a core until it has left.

    Args:
        events: into which the post's inbox (`inbox`) puts messages.
        numbers: what else to show of this worker, cheap to ask for.

    Attributes:
        counts: messages that were refused, by reason.
    """

    def __init__(
        self,
        core: Core,
        post: Post,
        port: EnginePort | None,
        spec: WorkerSpec,
        *,
        events: ShellEvents | None = None,
        numbers: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.core, self.post, self.spec, self.numbers = core, post, spec, numbers
        self.events = events or ShellEvents()
        self.counts: Counter[str] = Counter()
        self.engine = None
        if port is not None:
            self.engine = EngineThread(port, self.events.answer, lambda why: self.events.notice(Broken(why)))
        self._port: Any = port
        self._handled = 0
        self._wake_at: float | None = None
        self._hello_at = 0.0
        self._version = 0
        self._status: int | None = None
        self._leaving = self._overslept = False
        self._know({})

    def leave(self, grace: float) -> None:
        """Have the core drained, from any thread or signal handler; again, or below 0: end now."""
        self.events.notice(Leaving(grace))

    def run(self) -> int:
        """Until the core has left or the engine is broken; the exit status. The post's last words are out then."""
        if self.engine is not None:
            self.engine.start()
        self._step(Start())
        while self._status is None:
            now = time.monotonic()
            if now >= self._hello_at:
                self._hello(now)
            for event in self.events.turn():
                self._handle(event)
                if self._status is not None:
                    self._hello(now)  # the last numbers
                    return self._status
            self._tick(now)
            until = self._hello_at if self._wake_at is None else min(self._hello_at, self._wake_at)
            self.events.wait(until - time.monotonic())
        return self._status

    def close(self) -> None:
        """Flush the post and end the engine's thread, each within bounded time."""
        self.post.close(flush=FLUSH)
        if self.engine is not None and not self.engine.close(timeout=FLUSH):
            _log.warning("%s: its engine is still at work and ends with the process", self.spec.name)

    # Events

    def _tick(self, now: float) -> None:
        """Behind the messages, and a little later where this process has slept through it: words that came meanwhile
        are read first, so that nobody counts as silent who was not."""
        if self._wake_at is None or now < self._wake_at:
            return
        if now - self._wake_at > 2 * self.core.settings.beat and not self._overslept:
            self._overslept = True
            self._wake_at = now + _CATCH_UP
            return
        self._wake_at, self._overslept = None, False
        self._step(Tick())

    def _handle(self, event: Any) -> None:
        kind = type(event)
        if kind is Book:
            self._book(event)
        elif kind is Pixels:
            self._pixels(event)
        elif kind is Leaving:
            self._leave(event.grace)
        elif kind is Leave:
            if (event.name, event.life) == (self.spec.name, self.spec.life) and (event.grace < 0 or not self._leaving):
                self._leave(event.grace)
        elif kind is Broken:
            _log.critical("%s: %s", self.spec.name, event.why)
            self._status = 1
        else:
            self._step(event)

    def _step(self, event: Any) -> None:
        self._handled += 1
        try:
            actions = self.core.step(event, time.monotonic())
        except TypeError as error:
            if "is for another party" not in str(error):
                raise
            self.counts["for another party"] += 1
            _log.warning("%s", error)
            return
        for action in actions:
            if isinstance(action, Send):
                self.post.send(action.to, action.message)
            elif isinstance(action, Wake):
                self._wake_at = action.at
            elif isinstance(action, Exit):
                self._status = 0
            elif is_command(action) and self.engine is not None:
                self.engine.do(action)
            else:
                raise TypeError(f"action: got {type(action).__name__}, which {self.spec.role} has no use for")

    def _book(self, book: Book) -> None:
        if book.version > self._version:
            self._version = book.version
            self._know(book.addresses)

    def _know(self, addresses: dict[str, str]) -> None:
        """The supervisor and this party are known whatever a book says."""
        own = {SUPERVISOR: self.spec.supervisor, "scaler": self.spec.supervisor}
        self.post.know({**own, **addresses, self.core.name: self.post.address})

    def _pixels(self, message: Pixels) -> None:
        if self.engine is not None and hasattr(self._port, "pixels"):
            self.engine.call(lambda: self._port.pixels(message.digest, message.payload))
        else:
            self.counts["for another party"] += 1

    def _leave(self, grace: float) -> None:
        if grace < 0 or self._leaving or not isinstance(self.core, Worker):
            self._status = 0  # a router holds nothing that the next one does not learn
            return
        self._leaving = True
        _log.info("%s: leaves; its requests have %g s", self.spec.name, grace)
        self._step(Drain(self.spec.name, self.core.incarnation, grace))

    # Words to the supervisor

    def _hello(self, now: float) -> None:
        self._hello_at = now + self.core.settings.beat
        core, engine = self.core, self.engine
        self.post.send(
            SUPERVISOR,
            Hello(
                self.spec.name,
                self.spec.role,
                self.spec.life,
                self.post.address,
                os.getpid(),
                self._version,
                held=len(core.held),
                steps=self._handled if engine is None else engine.steps,
                waiting=self._waiting(now),
                memory=resident_bytes(),
                incarnation=core.incarnation if isinstance(core, Worker) else 0,
                numbers=self._numbers(),
            ),
        )

    def _waiting(self, now: float) -> float:
        """Seconds since the oldest thing that the engine owes was asked for."""
        asked = [] if self.engine is None else [self.engine.waiting_since()]
        if isinstance(self.core, Worker):
            asked.append(self.core._asked_since())
        return max(0.0, now - min((at for at in asked if at is not None), default=now))

    def _numbers(self) -> dict[str, float]:
        numbers = {f"post {name}": float(count) for name, count in self.post.counts.copy().items() if count}
        numbers |= {name: float(count) for name, count in self.counts.items()}
        if self.events.dropped:
            numbers["messages dropped"] = float(self.events.dropped)
        if self.engine is not None:
            numbers["engine failures"] = float(self.engine.failures)
        if isinstance(self.core, Router):
            numbers |= {"requests waiting": float(len(self.core.waiting)), "workers": float(len(self.core.fleet.views))}
        try:
            return numbers | self.numbers()
        except Exception as error:  # read beside the engine's thread
            _log.debug("numbers: %r", error)
            return numbers
