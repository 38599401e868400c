"""Where the workers of one host live: processes, or threads of this process."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.cluster.gpu_links import PeerLinks
from orchestrator.cluster.links import Links, SharedMemoryLinks, ThreadLinks, control_shape
from orchestrator.cluster.options import EpOptions
from orchestrator.model.config import ModelConfig

if TYPE_CHECKING:
    from orchestrator.cluster.process import Load

GONE = object()
"""In place of a message: the worker has ended."""
_JOIN_S = 5.0


class Workers(Protocol):
    """Started at once; numbered from 0."""

    def send(self, worker: int, message: Any) -> None:
        """Nothing happens for one that has ended."""

    def messages(self, timeout: float) -> list[tuple[int, Any]]:
        """What came, oldest first; `GONE` once, last, of a worker that has ended. Waits for something to come."""

    def kill(self, worker: int) -> None:
        """End it without asking."""

    def links(self, epoch: int, ranks: int) -> Links:
        """For a new epoch."""

    def close(self) -> None:
        """End all, and remove what they left."""


class ProcessWorkers:
    """Attributes:
    pids: of the processes, by worker.
    """

    _preload = "orchestrator.cluster.process"

    def __init__(
        self,
        count: int,
        options: EpOptions,
        model: ModelConfig,
        load: Load,
        wrap: Any = None,
        *,
        scratch: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        """`load` is called in each process, for a model of that configuration. `scratch`: for links."""
        self._scratch = scratch or tempfile.TemporaryDirectory(prefix="fathom-ep-", dir=links_folder())
        self._options, self._model, self._load, self._wrap = options, model, load, wrap
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([self._preload])
        self._lines: list[multiprocessing.connection.Connection] = []
        self._processes: list[Any] = []
        self._open: set[int] = set()
        self.pids: list[int] = []
        for _ in range(count):
            self.start()

    def start(self) -> int:
        """One process more; returns its number."""
        worker = len(self._processes)
        here, there = self._context.Pipe()
        main, args = self._main(worker)
        process = self._context.Process(target=main, args=(*args, there), daemon=True)
        process.start()
        there.close()
        self._lines.append(here)
        self._processes.append(process)
        self._open.add(worker)
        self.pids.append(process.pid or 0)
        return worker

    def _main(self, worker: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What a process runs, and its arguments before its end of the line."""
        from orchestrator.cluster.process import main

        return main, (worker, self._options, self._load, self._wrap)

    def send(self, worker: int, message: Any) -> None:
        try:
            self._lines[worker].send(message)
        except OSError:
            return  # it has ended, which `messages` tells

    def messages(self, timeout: float) -> list[tuple[int, Any]]:
        by_line = {self._lines[w]: w for w in self._open}
        found: list[tuple[int, Any]] = []
        for line in multiprocessing.connection.wait(list(by_line), timeout):
            worker = by_line[line]  # type: ignore[index]
            try:
                while self._lines[worker].poll(0):
                    found.append((worker, self._lines[worker].recv()))
            except (EOFError, OSError):
                self._open.discard(worker)
                found.append((worker, GONE))
        if not by_line:
            time.sleep(timeout)
        return found

    def kill(self, worker: int) -> None:
        self._processes[worker].kill()

    def links(self, epoch: int, ranks: int) -> Links:
        path = str(Path(self._scratch.name) / f"epoch{epoch}")
        links = PeerLinks if self._options.engine.device == "cuda" else SharedMemoryLinks
        return links(path, data_shape(self._options, self._model, ranks), self._options.timeout)

    def close(self) -> None:
        for process in self._processes:
            process.join(_JOIN_S if process.is_alive() and not self._open else 0)
            if process.is_alive():
                process.kill()
            process.join()
        for line in self._lines:
            line.close()
        self._scratch.cleanup()


def links_folder() -> Path:
    """Where files that processes share as memory are made."""
    place = Path("/dev/shm")
    return place if place.is_dir() else Path(tempfile.gettempdir())


class ThreadWorkers:
    """`start(worker, mailbox)` runs one; `pair(shape, timeout)` makes all ranks' communicators."""

    def __init__(
        self,
        count: int,
        options: EpOptions,
        model: ModelConfig,
        start: Callable[[int, ThreadMailbox], None],
        pair: Callable[[Any, float], list],
    ) -> None:
        self._options, self._model, self._pair = options, model, pair
        self._inbox: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._mailboxes = [ThreadMailbox(worker, self._inbox) for worker in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(start, mailbox), daemon=True) for mailbox in self._mailboxes
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, start: Callable[[int, ThreadMailbox], None], mailbox: ThreadMailbox) -> None:
        try:
            start(mailbox.worker, mailbox)
        finally:
            self._inbox.put((mailbox.worker, GONE))

    def send(self, worker: int, message: Any) -> None:
        self._mailboxes[worker].put(message)

    def messages(self, timeout: float) -> list[tuple[int, Any]]:
        found = []
        try:
            found.append(self._inbox.get(timeout=timeout))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found

    def kill(self, worker: int) -> None:
        """A thread cannot be killed; it is not listened to any more."""
        self._inbox.put((worker, GONE))

    def links(self, epoch: int, ranks: int) -> Links:
        timeout = self._options.timeout
        shape = data_shape(self._options, self._model, ranks)
        return ThreadLinks(self._pair(shape, timeout), self._pair(control_shape(ranks), timeout))

    def close(self) -> None:
        for thread in self._threads:
            thread.join(_JOIN_S)


class ThreadMailbox:
    """A worker's end of its line to the supervisor."""

    def __init__(self, worker: int, outbox: queue.Queue[tuple[int, Any]]) -> None:
        self.worker, self._outbox = worker, outbox
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._next: list[Any] = []

    def put(self, message: Any) -> None:
        self._inbox.put(message)

    def send(self, message: Any) -> None:
        self._outbox.put((self.worker, message))

    def poll(self, timeout: float | None = 0.0) -> bool:
        if not self._next:
            try:
                self._next.append(self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait())
            except queue.Empty:
                return False
        return True

    def recv(self) -> Any:
        return self._next.pop() if self._next else self._inbox.get()


def data_shape(options: EpOptions, model: ModelConfig, ranks: int) -> Any:
    """Sizes of the communicator of a group's tokens, an `ep_comm.Shape`."""
    from ep_comm import Shape

    assert options.slots is not None
    return Shape(
        ranks=ranks,
        max_tokens=max(options.engine.max_step_tokens, options.engine.max_num_seqs * model.dspark_block_size),
        hidden=model.hidden_size,
        top_k=model.num_experts_per_tok,
        experts=options.slots,
        dispatch="bfloat16" if options.engine.device == "cuda" else "float32",
    )
