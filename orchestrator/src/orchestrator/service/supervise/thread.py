"""The thread that runs a `Supervisor`. Worker processes are its children, so it stays until they are gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from orchestrator.service.supervise.supervisor import Supervisor

log = logging.getLogger("orchestrator.service")
T = TypeVar("T")
_TICK = 0.1
_ANSWER = 10.0


class SupervisorThread:
    """Only its thread touches the supervisor once it has started.

    Args:
        make: makes the supervisor from the time, in the thread.
        trouble: is told of `Supervisor.trouble` when it changes.
    """

    def __init__(
        self,
        make: Callable[[float], Supervisor],
        trouble: Callable[[str | None], None] = lambda why: None,
    ) -> None:
        self._make, self._trouble = make, trouble
        self._work: SimpleQueue[Callable[[Supervisor, float], None]] = SimpleQueue()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def receive(self, message: Any) -> None:
        """A message to the supervisor, from any thread; returns at once."""
        self._work.put(lambda supervisor, now: supervisor.receive(message, now))

    def ask(self, question: Callable[[Supervisor, float], T], timeout: float = _ANSWER) -> T:
        """Have a question answered in the thread. Raises what it raises, and TimeoutError."""
        future: Future[T] = Future()

        def work(supervisor: Supervisor, now: float) -> None:
            try:
                future.set_result(question(supervisor, now))
            except Exception as error:
                future.set_exception(error)

        self._work.put(work)
        return future.result(timeout)

    def status(self) -> dict[str, Any]:
        return self.ask(lambda supervisor, now: supervisor.status(now))

    def drain(self, name: str) -> str:
        """See `Supervisor.drain`."""
        return self.ask(lambda supervisor, now: supervisor.drain(name, now))

    def end(self, grace: float, timeout: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Have all workers leave, at once when `hurry` says so; whether all had left, unforced, within the time-out."""
        self.ask(lambda supervisor, now: supervisor.end(now, grace))
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if grace >= 0 and hurry():
                grace = -1.0
                self.ask(lambda supervisor, now: supervisor.end(now, -1.0))
            if self.ask(lambda supervisor, now: supervisor.ended):
                return self.ask(lambda supervisor, now: not supervisor.forced)
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """End the thread, once the workers are gone."""
        self._stop = True
        if self._thread.is_alive():
            self._thread.join(_ANSWER)

    def _run(self) -> None:
        supervisor = self._make(time.monotonic())
        shown: str | None = None
        ticked = 0.0
        while not self._stop:
            try:
                work = self._work.get(timeout=_TICK)
            except Empty:
                work = None
            try:
                now = time.monotonic()
                if work is not None:
                    work(supervisor, now)
                if now - ticked >= _TICK:
                    ticked = now
                    supervisor.tick(now)
            except Exception:
                log.exception("the supervisor failed at something; it goes on")
            if supervisor.trouble != shown:
                shown = supervisor.trouble
                self._trouble(shown)
