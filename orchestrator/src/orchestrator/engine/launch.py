"""Where device work goes: in order, one piece after the other, without the host waiting for any of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from orchestrator.engine.ranges import named

Work = Callable[[], None]


class Span(Protocol):
    """One piece of launched work."""

    def wait(self) -> None:
        """Until it has ended. Raises what it raised."""

    @property
    def seconds(self) -> float:
        """How long the device was busy with it; valid when it has ended."""

    def after(self, earlier: Any) -> float:
        """Seconds from the end of an earlier piece of the same launcher to its own beginning, when both have ended."""


class Launcher(Protocol):
    """A device's stream. `inline` work is done by the time that `launch` returns."""

    inline: bool

    def launch(self, work: Work, name: str = "work") -> Span:
        """Start a piece of work; `name` is what a profiler shows."""

    def close(self) -> None: ...


class _Timed:
    """Work of a CPU."""

    def __init__(self, work: Work, name: str) -> None:
        self._work, self._name, self._done = work, name, threading.Event()
        self.seconds = self.began = self.ended = 0.0
        self._error: BaseException | None = None

    def run(self) -> None:
        self.began = time.perf_counter()
        try:
            with torch.inference_mode(), named(self._name):
                self._work()
        except BaseException as error:  # whoever waits for it is told
            self._error = error
        self.ended = time.perf_counter()
        self.seconds = self.ended - self.began
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    def after(self, earlier: _Timed) -> float:
        return self.began - earlier.ended


class InOrder:
    """The CPU as a device that is done at once."""

    inline = True

    def launch(self, work: Work, name: str = "work") -> Span:
        span = _Timed(work, name)
        span.run()
        return span

    def close(self) -> None:
        pass


class Worker:
    """The CPU as a device that runs behind: one thread takes the pieces in order."""

    inline = False

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Timed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def launch(self, work: Work, name: str = "work") -> Span:
        span = _Timed(work, name)
        self._queue.put(span)
        return span

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while (span := self._queue.get()) is not None:
            span.run()


class _Events:
    def __init__(self) -> None:
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def wait(self) -> None:
        self.ended.synchronize()

    @property
    def seconds(self) -> float:
        return float(self.began.elapsed_time(self.ended)) * 1e-3

    def after(self, earlier: _Events) -> float:
        return float(earlier.ended.elapsed_time(self.began)) * 1e-3


class CudaStream:
    """The GPU's current stream. Work is started by the calling thread; what it returns is not there yet."""

    inline = False

    def launch(self, work: Work, name: str = "work") -> Span:
        span = _Events()
        span.began.record()
        with torch.inference_mode(), named(name):
            work()
        span.ended.record()
        return span

    def close(self) -> None:
        pass
