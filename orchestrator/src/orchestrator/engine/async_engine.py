"""The engine behind an event loop: one thread runs steps, coroutines add, abort and read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from orchestrator.engine.engine import Engine
from orchestrator.engine.grammar import Matcher
from orchestrator.engine.image_queue import ImageQueue
from orchestrator.engine.image_spans import ImageSpan, PlacedImage
from orchestrator.engine.images import ImageCounters
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


@dataclass(eq=False)
class _Stream:
    """One reader. `aborted` is for an abort by id that comes before the engine knows the request."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    aborted: bool = False


class AsyncEngine:
    """Requests are admitted and aborted between steps, so an abort frees its slot within two steps.

    `max_waiting` counts everything not yet running, also what the engine thread has not picked up.

    Readers and the engine thread meet in two places: `_commands`, done in order, and each stream's queue. Only the
    engine thread touches the engine and `_streams`, so no reader can get events of an earlier request with its id.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()  # guards the fields up to `_busy_since`
        self._commands: deque[Callable[[], None]] = deque()
        self._open: dict[str, _Stream] = {}
        self._arriving = 0  # past the door, not yet in the engine
        self._stopping = False
        self._failed: str | None = None
        self._busy_since = time.monotonic()
        self._streams: dict[str, _Stream] = {}
        self._images = ImageQueue(engine)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """May be read from any thread."""
        scheduler = self.engine.scheduler
        with self._wake:
            return Progress(
                has_work=bool(self._commands) or self.engine.has_work,
                last_step=max(self.engine.stats.last_step, self._busy_since),
                steps=self.engine.stats.steps,
                running=len(scheduler.running) + len(scheduler.parked),
                waiting=len(scheduler.waiting) + self._arriving,
                failed=self._failed,
            )

    @property
    def image_counters(self) -> ImageCounters | None:
        """What the image encoder did; None without one."""
        return None if self.engine.images is None else self.engine.images.counters

    async def generate(
        self, request_id: str, prompt: list[int], params: SamplingParams, images: Iterable[PlacedImage] = ()
    ) -> AsyncGenerator[Event, None]:
        """Events of one request, `Finished` last. Closing the iterator early aborts the request.

        A list of `images` is emptied once they are encoded, since pixels take much memory.

        Raises `ValueError` and `EngineFull` as `Engine.add` does, `RuntimeError` when the engine has died.
        """
        placed = images if isinstance(images, list) else list(images)
        self.engine.check(prompt, params, placed)
        stream = _Stream(request_id, asyncio.get_running_loop())
        self._enter(stream)
        finished = False
        try:
            await self._submit(stream, prompt, params, placed)
            while not finished:
                event = await stream.queue.get()
                finished = isinstance(event, Finished | Exception)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            with self._wake:
                del self._open[request_id]
                if not finished:
                    self._tell(lambda: self._abort(stream))

    def abort(self, request_id: str) -> None:
        """Ask for a request to end; returns at once. Its reader gets `Finished`. Unknown ids are no error."""
        with self._wake:
            stream = self._open.get(request_id)
            if stream is not None:
                stream.aborted = True
                self._tell(lambda: self._abort(stream))

    def close(self) -> None:
        """Stop the thread after the step it is in; open requests get an error. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._images.close()
        self._thread.join(timeout=30)

    # What readers call.

    def _enter(self, stream: _Stream) -> None:
        request_id, limit = stream.request_id, self.engine.config.max_waiting
        with self._wake:
            if self._failed is not None or self._stopping:
                raise RuntimeError(f"the engine is not running: {self._failed or 'it was shut down'}")
            if request_id in self._open:
                raise ValueError(f"request_id: got {request_id!r}, which is running; ids have to be unique")
            if len(self.engine.scheduler.waiting) + self._arriving >= limit:
                raise EngineFull(f"{limit} requests are waiting already; try again later")
            self._open[request_id] = stream
            self._arriving += 1

    async def _submit(
        self, stream: _Stream, prompt: list[int], params: SamplingParams, images: list[PlacedImage]
    ) -> None:
        """Hand the request over, its grammar compiled and its images encoded: that takes time, and the others go on."""
        handed_over = False
        try:
            matcher = None if params.grammar is None else await asyncio.to_thread(self.engine.compile, params)
            encoded = await self._images.encode(images, params)
            images.clear()
            self._tell(lambda: self._add(stream, prompt, params, matcher, encoded))
            handed_over = True
        finally:
            if not handed_over:
                with self._wake:
                    self._arriving = max(0, self._arriving - 1)

    def _tell(self, command: Callable[[], None]) -> None:
        """Have the engine thread do something before its next step."""
        with self._wake:
            if self._stopping:
                return  # the thread tells every open stream when it ends
            if not self._commands and not self.engine.has_work:
                self._busy_since = time.monotonic()
            self._commands.append(command)
            self._wake.notify()

    # What the engine thread does.

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work:
                    self._deliver(self.engine.step())
        except Exception as error:  # the thread is the engine: whatever ends it is reported to everybody
            with self._wake:
                self._failed = f"{type(error).__name__}: {error}"
        with self._wake:
            self._stopping, self._arriving = True, 0
            self._commands.clear()
            left = list(self._open.values())
        for stream in left:
            self._send([(stream, RuntimeError(f"the engine stopped: {self._failed or 'shut down'}"))])
        self._streams.clear()

    def _obey(self) -> bool:
        """Wait for something to do and carry commands out; False when it is time to stop."""
        with self._wake:
            while not (self._commands or self.engine.has_work or self._stopping):
                self._wake.wait()
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        return True

    def _add(
        self,
        stream: _Stream,
        prompt: list[int],
        params: SamplingParams,
        matcher: Matcher | None,
        encoded: tuple[ImageSpan, ...],
    ) -> None:
        with self._wake:  # so that nobody sees the request counted twice, or not at all
            self._arriving -= 1
            if stream.aborted:
                self.engine.release(encoded, params)
                self._send([(stream, Finished(stream.request_id, "abort", prompt_tokens=len(prompt)))])
                return
            try:
                self.engine.add(stream.request_id, prompt, params, matcher=matcher, encoded=encoded)
                self._streams[stream.request_id] = stream
            except (ValueError, EngineFull) as error:
                self.engine.release(encoded, params)
                self._send([(stream, error)])

    def _abort(self, stream: _Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            self.engine.abort(stream.request_id)
            self._deliver(self.engine.take_events())  # before another request comes in under the same id

    def _deliver(self, events: list[Event]) -> None:
        self._send([(self._streams[event.request_id], event) for event in events])
        for event in events:
            if isinstance(event, Finished):
                del self._streams[event.request_id]

    @staticmethod
    def _send(items: list[tuple[_Stream, Event | Exception]]) -> None:
        """Put events into their streams' queues, with one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Event | Exception]]] = {}
        for stream, event in items:
            by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, mine in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the readers' loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(_put, mine)


def _put(items: list[tuple[_Stream, Event | Exception]]) -> None:
    for stream, event in items:
        stream.queue.put_nowait(event)
