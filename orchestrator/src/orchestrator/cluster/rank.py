"""A worker of an expert-parallel engine: one rank in each epoch that it is a member of.

It ends an epoch when a peer fails, keeps its weights, and waits to be told the next one. Requests are not kept: the
supervisor knows each one's tokens, and gives them out again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from ep_comm import CommError, Communicator, PeerTimeout
from orchestrator.balance.eplb.coordinator import Coordinator
from orchestrator.balance.eplb.placement import EMPTY, Placement, initial
from orchestrator.balance.eplb.rank_slots import RankSlots
from orchestrator.cluster.agreement import Agreement
from orchestrator.cluster.counts import StepCounts
from orchestrator.cluster.leader import Leader
from orchestrator.cluster.links import Pair
from orchestrator.cluster.messages import Abort, Broke, Failed, Form, Leave, Left, Refused, Serving, Submit, Told, Up
from orchestrator.cluster.mover import Delays, Mover
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.plan_process import Planner, PlanProcess
from orchestrator.engine.engine import Engine
from orchestrator.engine.lockstep import Lockstep
from orchestrator.engine.request import EngineFull, Event, TokenOutput
from orchestrator.model.expert_parallel import ExpertPool, ExpertSource, HeldExperts, attach, fill
from orchestrator.model.expert_parallel.pool import ExpertShapes
from orchestrator.model.transformer import Transformer
from orchestrator.text.tokenizer import Tokenizer

_IDLE_S = 0.002  # between agreements while no rank has work


class Mailbox(Protocol):
    """One end of a line to the supervisor, as `multiprocessing.connection.Connection`."""

    def send(self, message: Any) -> None: ...

    def poll(self, timeout: float | None = 0.0) -> bool: ...

    def recv(self) -> Any: ...


class Killed(BaseException):
    """Raised in a worker of a test to have it end without a word."""


class Worker:
    """Attributes:
    number: by which the supervisor knows it, whatever its rank. rank: what it is, or was last.
    wrap: what a test puts around the data link; None for nothing. delays: of moves, likewise.
    """

    def __init__(
        self,
        number: int,
        options: EpOptions,
        model: Transformer,
        tokenizer: Tokenizer | None,
        source: ExpertSource,
        mailbox: Mailbox,
        *,
        planner: Callable[[], Planner] = PlanProcess,
        wrap: Callable[[Communicator], Communicator] | None = None,
        delays: Delays | None = None,
    ) -> None:
        self.number = number
        self.options, self.model, self.tokenizer, self.source = options.resolved(model.config), model, tokenizer, source
        self.mailbox, self._planner, self.wrap, self.delays = mailbox, planner, wrap, delays
        config, slots, spares = model.config, self.options.slots, self.options.spares
        assert slots is not None and spares is not None
        self.slots, self.spares = slots, spares
        shapes = ExpertShapes.of(config.hidden_size, config.moe_intermediate_size)
        self.pool = ExpertPool(shapes, config.num_hidden_layers * slots + spares)
        self.held: HeldExperts | None = None
        self.rank: Rank | None = None
        self.steps = 0
        self.loads: np.ndarray | None = None  # of the last epoch in which counts were gathered

    def run(self) -> None:
        """Serve epochs until told to leave."""
        self.mailbox.send(Up(os.getpid()))
        message: Any = None
        while not isinstance(message, Leave):
            if isinstance(message, Form):
                message = self._epoch(message)
            else:  # of an epoch that is over
                message = self.mailbox.recv()

    def _epoch(self, form: Form) -> Form | Leave | None:
        """Be a rank until the epoch ends; returns the message that ended it, None where a failure did."""
        try:
            rank = self.rank = Rank(self, form)
        except CommError as error:
            self.mailbox.send(_broke(form.epoch, error))
            return None
        try:
            return rank.serve()
        except CommError as error:
            self.mailbox.send(_broke(form.epoch, error))
            return None
        finally:
            rank.close()


class Rank:
    """A worker in one epoch."""

    def __init__(self, worker: Worker, form: Form) -> None:
        self.worker, self.epoch, self._began = worker, form.epoch, time.perf_counter()
        options, model, self.mailbox = worker.options, worker.model, worker.mailbox
        self.rank, ranks = form.members.index(worker.number), len(form.members)
        self.links: Pair = form.links.open(self.rank)
        held, first = self._survey(ranks)
        before = None if worker.held is None else worker.held.slots.live
        slots = RankSlots(self.rank, held, worker.spares, before)
        worker.held = self.held = HeldExperts(slots, worker.pool)
        self.read = fill(self.held, worker.source) if first else 0
        config = model.config
        self.counts = StepCounts(
            config.num_hidden_layers, config.n_routed_experts, config.num_experts_per_tok, options.eplb.window
        )
        self.mover = Mover(self.held, self.links.control, worker.source, worker.delays)
        self.leader = self._leader(held) if self.rank == 0 else None
        self.agreement = Agreement(self.links.control, self.held, self.counts, self.mover, options.eplb, self.leader)
        data = self.links.data if worker.wrap is None else worker.wrap(self.links.data)
        attach(model, data, self.held, self.counts, options.combine)
        self.engine = Engine(model, worker.tokenizer, options.engine)
        self.engine.lockstep = Lockstep(self.agreement)
        self._index: dict[str, int] = {}
        self._serving = False

    def _survey(self, ranks: int) -> tuple[Placement, bool]:
        """What the ranks hold together, and whether they hold nothing yet; collective."""
        config, slots = self.worker.model.config, self.worker.slots
        layers, experts = config.num_hidden_layers, config.n_routed_experts
        mine = np.full((layers, slots), EMPTY, np.int64)
        if self.worker.held is not None:
            old = self.worker.held.slots
            mine[:] = old.table[:, old.rank]
        row = torch.from_numpy(mine.reshape(-1))
        parts = [self.links.control.all_gather(part.contiguous()) for part in row.split(65536)]
        rows = torch.cat(parts, 1).numpy().reshape(ranks, layers, slots)
        if (rows == EMPTY).all():
            return initial(layers, experts, ranks, slots), True
        return Placement(np.ascontiguousarray(rows.transpose(1, 0, 2)).astype(np.int32), experts), False

    def _leader(self, held: Placement) -> Leader:
        options, worker = self.worker.options, self.worker
        start = initial(held.layers, held.num_experts, held.ranks, held.slots)
        coordinator = Coordinator(
            start, worker.pool.expert_bytes,
            bytes_per_step=options.bytes_per_step, spares=worker.spares, patience=options.patience,
        )  # fmt: skip
        leader = Leader(coordinator, options.eplb, worker._planner())
        coordinator.restart(held, 0)
        if (held.copies() == 0).any():
            leader.repair(worker.loads)
        return leader

    def serve(self) -> Form | Leave:
        """Steps until told to leave or to form the next epoch."""
        self.engine.step()  # agrees on the first one
        while True:
            ended = self._read_mail()
            if ended is not None:
                return ended
            self._tell(self.engine.step())
            self._note_serving()
            if self.agreement.over:
                self._say_goodbye()
                self.mailbox.poll(self.worker.options.timeout)  # for all others: who still reads may not find us gone
                return Leave()
            assert self.engine.lockstep is not None
            if not self.engine.lockstep.runs:
                self.mailbox.poll(_IDLE_S)

    def close(self) -> None:
        self.worker.steps += self.agreement.ran
        if self.agreement.loads is not None:
            self.worker.loads = self.agreement.loads
        if self.leader is not None:
            self.leader.planner.close()
        self.links.close()

    def _read_mail(self) -> Form | None:
        while self.mailbox.poll(0):
            message = self.mailbox.recv()
            if isinstance(message, Form):
                return message
            if isinstance(message, Leave):
                self.agreement.leaving = True
            elif isinstance(message, Abort):
                self.engine.abort(message.request_id)
            elif isinstance(message, Submit) and message.epoch == self.epoch:
                self._add(message)
        return None

    def _add(self, message: Submit) -> None:
        try:
            self.engine.add(message.request_id, list(message.prompt), message.params, generated=message.generated)
        except (ValueError, EngineFull) as error:
            self.mailbox.send(Refused(self.epoch, message.request_id, str(error)))
            return
        self._index[message.request_id] = len(message.generated)

    def _tell(self, events: list[Event]) -> None:
        if not events:
            return
        told = []
        for event in events:
            index = -1
            if isinstance(event, TokenOutput):
                index = self._index[event.request_id]
                self._index[event.request_id] = index + 1
            told.append((index, event))
        self.mailbox.send(Told(self.epoch, tuple(told)))

    def _note_serving(self) -> None:
        if self.agreement.complete and not self._serving:
            self._serving = True
            counts = self.mover.counts
            read = self.read + counts["from the checkpoint"]
            self.mailbox.send(Serving(self.epoch, time.perf_counter() - self._began, counts["from peers"], read))

    def _say_goodbye(self) -> None:
        leader = self.leader
        self.mailbox.send(
            Left(
                steps=self.worker.steps + self.agreement.ran,
                collectives=self.links.data.epoch,
                moe_lb=() if leader is None else tuple(leader.lb),
                plans={} if leader is None else dict(leader.coordinator.counts),
                bytes_moved=dict(self.mover.counts),
                digests=self.held.digests(),
            )
        )


def _broke(epoch: int, error: CommError) -> Broke:
    return Broke(epoch, str(error), error.waiting_for if isinstance(error, PeerTimeout) else ())


def failure(error: BaseException) -> Failed:
    """What a worker says when it cannot go on."""
    return Failed(f"{type(error).__name__}: {error}")
