"""Processes of a group's ranks, written to without waiting."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from orchestrator.cluster.messages import Leave, Left
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.workers import GONE, ProcessWorkers
from orchestrator.model.config import ModelConfig
from orchestrator.service.ep.process import RankSetup, main
from orchestrator.service.ep.scratch import ScratchFolder

_LOOK = 0.05  # seconds


class RankProcesses(ProcessWorkers):
    """Numbered in the order of their starts; each has a place in the group, which another may have had before."""

    _preload = "orchestrator.service.ep.process"

    def __init__(self, options: EpOptions, model: ModelConfig, setup: RankSetup) -> None:
        super().__init__(0, options, model, setup.load, scratch=ScratchFolder())
        self._setup, self._place = setup, 0
        self._outboxes: dict[int, queue.SimpleQueue[Any]] = {}

    def start_at(self, place: int) -> int:
        """Start a process for a place; returns its number."""
        self._place = place
        number = self.start()
        outbox = self._outboxes[number] = queue.SimpleQueue()
        threading.Thread(target=self._write, args=(number, outbox), name=f"to rank {place}", daemon=True).start()
        return number

    def send(self, worker: int, message: Any) -> None:
        self._outboxes[worker].put(message)

    def kill(self, worker: int) -> None:
        super().kill(worker)
        self._outboxes[worker].put(None)

    def close(self, grace: float = 0.0) -> None:
        """End all: those of a group that serves leave together within `grace` seconds, the rest are killed."""
        limit = time.monotonic() + grace
        staying = set(self._open) if grace > 0 else set()
        for number in staying:
            self.send(number, Leave())
        while staying and time.monotonic() < limit:
            staying -= {number for number, said in self.messages(_LOOK) if said is GONE or isinstance(said, Left)}
        for number in set(self._open):
            self.send(number, Leave())  # the last word: all have left the group
        while self._open and time.monotonic() < limit:
            self.messages(_LOOK)
        for number, outbox in self._outboxes.items():
            if number in self._open:
                super().kill(number)
            outbox.put(None)
        super().close()

    def _main(self, worker: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return main, (self._place, self._options, self._setup)

    def _write(self, number: int, outbox: queue.SimpleQueue[Any]) -> None:
        while (message := outbox.get()) is not None:
            super().send(number, message)
