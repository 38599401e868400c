"""The engine behind an event loop: one thread runs steps, coroutines add, abort and read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from orchestrator.engine.engine import Engine
from orchestrator.engine.request import EngineFull, Event, Finished, SamplingParams


@dataclass(frozen=True)
class Progress:
    """What a health check needs: is there work, and when did a step last end (`time.monotonic`)."""

    has_work: bool
    last_step: float
    steps: int
    running: int
    waiting: int
    failed: str | None

    def stalled(self, limit: float) -> bool:
        """True when work is there and no step has ended for `limit` seconds, or the engine died."""
        return self.failed is not None or (self.has_work and time.monotonic() - self.last_step > limit)


@dataclass
class _Stream:
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Event | Exception]


class AsyncEngine:
    """Requests are admitted and aborted between steps, so an abort frees its slot within two steps.

    `max_waiting` counts everything not yet running, also what the engine thread has not picked up.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()
        self._commands: deque[tuple[str, str, list[int], SamplingParams | None]] = deque()
        self._streams: dict[str, _Stream] = {}
        self._stopping = False
        self._failed: str | None = None
        self._busy_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        scheduler = self.engine.scheduler
        has_work = bool(self._commands) or self.engine.has_work
        return Progress(
            has_work=has_work,
            last_step=max(self.engine.stats.last_step, self._busy_since),
            steps=self.engine.stats.steps,
            running=len(scheduler.running) + len(scheduler.parked),
            waiting=len(scheduler.waiting) + sum(c[0] == "add" for c in tuple(self._commands)),
            failed=self._failed,
        )

    async def generate(self, request_id: str, prompt: list[int], params: SamplingParams) -> AsyncIterator[Event]:
        """Events of one request, `Finished` last. Closing the iterator early aborts the request.

        Raises `ValueError` and `EngineFull` as `Engine.add` does, `RuntimeError` when the engine has died.
        """
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        with self._wake:
            if self._failed is not None or self._stopping:
                raise RuntimeError(f"the engine is not running: {self._failed or 'it was shut down'}")
            if request_id in self._streams:
                raise ValueError(f"request_id: got {request_id!r}, which is running; ids have to be unique")
            if self.progress.waiting >= self.engine.config.max_waiting:
                raise EngineFull(f"{self.engine.config.max_waiting} requests are waiting already; try again later")
            if not self.engine.has_work and not self._commands:
                self._busy_since = time.monotonic()
            self._streams[request_id] = stream
            self._commands.append(("add", request_id, prompt, params))
            self._wake.notify()
        finished = False
        try:
            while not finished:
                event = await stream.queue.get()
                if isinstance(event, Exception):
                    finished = True
                    raise event
                finished = isinstance(event, Finished)
                yield event
        finally:
            if not finished:
                self.abort(request_id)
            self._streams.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Ask for a request to end; returns at once."""
        with self._wake:
            self._commands.append(("abort", request_id, [], None))
            self._wake.notify()

    def close(self) -> None:
        """Stop the thread; open requests get an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self.engine.has_work or self._stopping):
                        self._wake.wait()
                    if self._stopping:
                        break
                    commands = [self._commands.popleft() for _ in range(len(self._commands))]
                for command in commands:
                    self._obey(*command)
                if self.engine.has_work:
                    self._deliver(self.engine.step())
        except Exception as error:  # the thread is the engine: whatever ends it is reported to everybody
            self._failed = f"{type(error).__name__}: {error}"
        for request_id in list(self._streams):
            self._send(request_id, RuntimeError(f"the engine stopped: {self._failed or 'shut down'}"))

    def _obey(self, what: str, request_id: str, prompt: list[int], params: SamplingParams | None) -> None:
        if what == "abort":
            self.engine.abort(request_id)
            return
        assert params is not None
        try:
            self.engine.add(request_id, prompt, params)
        except (ValueError, EngineFull) as error:
            self._send(request_id, error)

    def _deliver(self, events: list[Event]) -> None:
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, mine in by_request.items():
            self._send(request_id, *mine)

    def _send(self, request_id: str, *items: Event | Exception) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return

        def put() -> None:
            for item in items:
                stream.queue.put_nowait(item)

        with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody is left to tell
            stream.loop.call_soon_threadsafe(put)
