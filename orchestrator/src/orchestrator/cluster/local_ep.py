"""An expert-parallel engine on one host: starts workers, spreads requests, and goes on when one of them dies.

A failure ends the epoch. Survivors form the next one, find new places for the experts, and go on with the requests that
they have. Those of the dead are given to them with the tokens that came so far, which are computed again as one reads a
prompt, so what follows is what would have followed. A token counts once, by (worker that has the request, index).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from kernel_core.check import require
from orchestrator.balance.eplb.placement import smallest_slots
from orchestrator.cluster.messages import (
    Abort,
    Balance,
    Broke,
    Failed,
    Form,
    Leave,
    Left,
    Refused,
    Serving,
    Submit,
    Told,
    Up,
)
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.workers import GONE, Workers
from orchestrator.engine.handoff.given_out import GivenOut
from orchestrator.engine.request import Event, Finished, Ready, SamplingParams, TokenOutput
from orchestrator.model.config import ModelConfig

_log = logging.getLogger(__name__)
_LOAD_S = 600.0  # for a worker to load its model
_TICK_S = 0.05


@dataclass(frozen=True)
class Resize:
    """One change of the group: which workers were lost, and what it took until steps ran again.

    `seconds` from the first sign of the failure; bytes of experts that the survivors had to get, over all ranks;
    `kept` requests went on where they were, `replayed` ones were given to another worker.
    """

    epoch: int
    lost: tuple[int, ...]
    ranks: int
    seconds: float
    from_peers: int
    from_checkpoint: int
    kept: int
    replayed: int


@dataclass
class _Request(GivenOut):
    worker: int = -1


class LocalExpertParallel:
    """Not thread-safe: one thread submits and polls.

    Attributes:
        epoch: of the present group. members: its workers, in the order of ranks.
        resizes: changes so far. left: what the workers said when they left.
        dropped: messages of epochs that were over, of workers that had lost a request, tokens that had come before.
        balance: how evenly experts are loaded and what became of plans in this epoch, as rank 0 said last.
        bytes_read: of the checkpoint's tensors, by worker: all but experts, and the experts that it holds or held.
    """

    def __init__(self, workers: Workers, options: EpOptions, model: ModelConfig) -> None:
        """Wait until all workers have loaded the model and serve.

        Raises:
            RuntimeError: one of them failed before.
        """
        self._workers, self.options, self._model = workers, options.resolved(model), model
        self.members: tuple[int, ...] = tuple(range(options.ranks))
        self.epoch = 0
        self.resizes: list[Resize] = []
        self.left: dict[int, Left] = {}
        self.dropped: Counter[str] = Counter()
        self.balance = Balance(0)
        self.bytes_read: Counter[int] = Counter()
        self._requests: dict[str, _Request] = {}
        self._events: deque[Event] = deque()
        self._ids = count()
        self._up: set[int] = set()
        self._serving: dict[int, Serving] = {}
        self._broke: dict[int, Broke] = {}
        self._began, self._deadline = time.perf_counter(), 0.0
        self._lost: tuple[int, ...] = ()
        self._kept = self._replayed = 0
        self._fatal = ""
        limit = time.monotonic() + _LOAD_S
        while len(self._up) < options.ranks:
            self._pump(_TICK_S)
            if self._fatal or time.monotonic() > limit:
                self.close()
                raise RuntimeError(self._fatal or f"workers took more than {_LOAD_S:g} s to load the model")
        self._form()

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Queue a prompt with the worker that has fewest requests; returns the request's id.

        A request without a seed gets one, so that it can go on elsewhere.
        """
        require(len(prompt) > 0, "prompt", "no tokens", "at least one")
        if self._fatal:
            raise RuntimeError(self._fatal)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        request = _Request(f"{next(self._ids)}", tuple(prompt), params)
        self._requests[request.id] = request
        self._give(request)
        return request.id

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and ended ids are no error."""
        request = self._requests.get(request_id)
        if request is not None:
            self._workers.send(request.worker, Abort(request_id))

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    def poll(self, timeout: float = _TICK_S) -> list[Event]:
        """Events that have come, each request's in order; waits for some."""
        if not self._events:
            self._pump(timeout)
        events = list(self._events)
        self._events.clear()
        return events

    def events(self) -> Iterator[Event]:
        """All events until no request is unfinished."""
        while self._requests or self._events:
            yield from self.poll()

    def close(self) -> None:
        """Let the workers leave together, and end those that do not. Idempotent."""
        limit = time.monotonic() + self.options.timeout
        for worker in self.members:
            self._workers.send(worker, Leave())
        while set(self.members) - set(self.left) and time.monotonic() < limit and not self._fatal:
            self._pump(_TICK_S, regroup=False)
            if self._broke:
                break
        for worker in self.members:
            self._workers.send(worker, Leave())
        self._workers.close()
        self.members = ()

    # Messages

    def _pump(self, timeout: float, regroup: bool = True) -> None:
        lost: list[int] = []
        for worker, message in self._workers.messages(timeout):
            if message is GONE:
                if worker in self.members and worker not in self.left:
                    lost.append(worker)
            else:
                self._take(worker, message)
        if lost and (not regroup or len(self._up) < self.options.ranks):
            self._fatal = self._fatal or f"workers {lost} ended"
        elif lost:
            self._note_failure(f"workers {lost} ended")
            self._regroup(set(lost))
        elif regroup and self._broke and not self._fatal:
            self._settle()

    def _take(self, worker: int, message: Any) -> None:
        if isinstance(message, Up):
            self._up.add(worker)
            self.bytes_read[worker] += message.read
        elif isinstance(message, Failed):
            _log.error("worker %d failed: %s", worker, message.reason)
            if len(self._up) < self.options.ranks:
                self._fatal = f"worker {worker}: {message.reason}"
        elif isinstance(message, Left):
            self.left[worker] = message
        elif isinstance(message, Told):
            for index, event in message.events:
                self._event(worker, index, event)
        elif isinstance(message, Refused):
            self._event(worker, -1, Finished(message.request_id, "error", error=message.reason))
        elif message.epoch != self.epoch:
            self.dropped["of an earlier epoch"] += 1
        elif isinstance(message, Balance):
            self.balance = message
        elif isinstance(message, Serving):
            self._note_serving(worker, message)
        elif isinstance(message, Broke):
            self._note_failure(message.reason)
            self._broke[worker] = message

    def _event(self, worker: int, index: int, event: Event) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            self.dropped["of an ended request"] += 1
        elif request.worker != worker:
            self.dropped["of a worker that had lost it"] += 1
        elif isinstance(event, TokenOutput):
            if not request.note(index, event.token_id):
                self.dropped["that had come before"] += 1
                return
            self._events.append(event)
        elif isinstance(event, Finished):
            self._finish(request.id, event)
        elif isinstance(event, Ready) and not request.ready:
            request.ready = True
            self._events.append(event)

    def _finish(self, request_id: str, event: Finished) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._events.append(event)

    def _give(self, request: _Request) -> None:
        load = Counter(r.worker for r in self._requests.values())
        request.worker = min(self.members, key=lambda worker: (load[worker], worker))
        self._workers.send(
            request.worker,
            Submit(request.id, request.prompt, request.params, tuple(request.tokens)),
        )

    # Epochs

    def _note_failure(self, reason: str) -> None:
        if not self._broke and not self._deadline:
            _log.warning("epoch %d ends: %s", self.epoch, reason)
            self._began = time.perf_counter()
        if not self._deadline:
            self._deadline = time.monotonic() + self.options.timeout + 1.0

    def _settle(self) -> None:
        """Some ranks report a failure: once the others had their time, those that say nothing are ended."""
        silent = set(self.members) - set(self._broke)
        if not silent:
            self._regroup(set())
        elif time.monotonic() > self._deadline:
            for worker in silent:
                self._workers.kill(worker)
            self._regroup(silent)

    def _regroup(self, lost: set[int]) -> None:
        self._lost = (*self._lost, *sorted(lost))
        self.members = tuple(worker for worker in self.members if worker not in lost)
        slots, experts = self.options.slots, self._model.n_routed_experts
        assert slots is not None
        if not self.members or smallest_slots(experts, len(self.members)) > slots:
            self._fatal = f"{len(self.members)} ranks of {slots} slots cannot hold {experts} experts"
            _log.error("%s; every request ends", self._fatal)
            for request_id in list(self._requests):
                self._finish(request_id, Finished(request_id, "error", error=self._fatal))
            return
        self._form()

    def _form(self) -> None:
        self.epoch += 1
        self._serving, self._broke, self._deadline = {}, {}, 0.0
        form = Form(self.epoch, self.members, self._workers.links(self.epoch, len(self.members)))
        for worker in self.members:
            self._workers.send(worker, form)
        homeless = [request for request in self._requests.values() if request.worker not in self.members]
        self._kept = len(self._requests) - len(homeless)
        self._replayed += len(homeless)
        for request in homeless:
            request.worker = -1
        for request in homeless:
            self._give(request)

    def _note_serving(self, worker: int, message: Serving) -> None:
        self._serving[worker] = message
        self.bytes_read[worker] += message.from_checkpoint
        if len(self._serving) < len(self.members):
            return
        if self._lost:
            self.resizes.append(
                Resize(
                    self.epoch, self._lost, len(self.members), time.perf_counter() - self._began,
                    sum(s.from_peers for s in self._serving.values()),
                    sum(s.from_checkpoint for s in self._serving.values()),
                    self._kept, self._replayed,
                )
            )  # fmt: skip
        self._lost, self._replayed = (), 0
