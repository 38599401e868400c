"""One life of a worker that an actor of Ray keeps. All talk with Ray is in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.service.messages import WorkerSpec
from orchestrator.service.supervise.launch.base import how_it_ended

if TYPE_CHECKING:
    from orchestrator.service.supervise.launch.ray import RayLauncher

_ANSWER = 5.0  # seconds that a keeper has for a short call


class RayHandle:
    """See `Handle`. Events come through one queue: requests of the supervisor, and answers of Ray by callback."""

    def __init__(self, launcher: RayLauncher, spec: WorkerSpec) -> None:
        self.pid, self.node = 0, ""
        self._launcher, self._ray, self._spec = launcher, launcher.ray, spec
        self._ended: str | None = None
        self._tail = ""
        self._keeper: Any = None
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name=f"ray-{spec.name}-{spec.life}", daemon=True).start()

    def poll(self) -> str | None:
        return self._ended

    def terminate(self) -> None:
        self._events.put(self._terminate)

    def kill(self) -> None:
        self._events.put(self._kill)

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self._tail.splitlines()[-lines:])

    # In the thread

    def _run(self) -> None:
        try:
            self._keeper = self._launcher.keeper(self._spec)
            line = msgspec.json.encode(self._spec)
            self._when_done(self._keeper.start.remote(line, self._launcher.command), self._started)
            while self._ended is None:
                self._events.get()()
        except Exception as error:
            self._end(f"start failed: {type(error).__name__}: {error}", forget=True)

    def _when_done(self, reference: Any, then: Callable[[Any, BaseException | None], None]) -> None:
        """Have an answer of Ray, or its failure, handled by the thread."""

        def done(future: Any) -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            self._events.put(lambda: then(value, error))

        reference.future().add_done_callback(done)

    def _started(self, value: Any, error: BaseException | None) -> None:
        if error is not None:
            self._failed(error, "start failed: ")
            return
        self.pid, self.node = value
        self._when_done(self._keeper.watch.remote(self._spec.life), self._over)

    def _over(self, value: Any, error: BaseException | None) -> None:
        if error is not None:
            self._failed(error)
            return
        status, self._tail = value
        # Who has left for good needs no actor any more; for another life after a failure there is one already.
        self._end(how_it_ended(status), forget=status == 0)

    def _failed(self, error: BaseException, where: str = "") -> None:
        died = isinstance(error, self._ray.exceptions.RayActorError)
        words = "actor died" if died else f"{where}{type(error).__name__}: {error}"
        self._tail = self._tail or str(error)
        self._end(words, forget=True)

    def _terminate(self) -> None:
        if self._keeper is not None:
            self._keeper.terminate.remote()

    def _kill(self) -> None:
        """The child through its keeper, or with it where that does not answer."""
        if self._ended is not None:
            return
        if self.pid and self._keeper is not None:
            with contextlib.suppress(Exception):
                self._ray.get(self._keeper.kill.remote(), timeout=_ANSWER)
                return
        self._end("signal 9 (with its actor)", forget=True)

    def _end(self, how: str, *, forget: bool) -> None:
        if forget and self._keeper is not None:
            with contextlib.suppress(Exception):
                self._launcher.forget(self._spec.name, self._keeper)
        self._ended = how
