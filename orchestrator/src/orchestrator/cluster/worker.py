"""A worker of an expert-parallel engine: one rank in each epoch that it is a member of.

It ends an epoch when a peer fails, keeps weights, requests and their caches, and waits to be told the next one. A step
that the failure ended is taken back and runs again there, so what its requests say is what they would have said.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from ep_comm import CommError, Communicator, PeerTimeout
from orchestrator.cluster.desk import Desk, Mailbox, Requests
from orchestrator.cluster.messages import Broke, Failed, Form, Leave, Up
from orchestrator.cluster.mover import Delays
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.plan_process import Planner, PlanProcess
from orchestrator.cluster.rank import Rank
from orchestrator.engine.engine import Engine
from orchestrator.engine.launch import Launcher
from orchestrator.model.expert_parallel import (
    DraftExperts,
    ExpertPool,
    ExpertShapes,
    ExpertSource,
    HeldExperts,
    LoadedPacked,
    PackedPool,
    PackedSource,
)
from orchestrator.model.expert_parallel.pool import BufferPool
from orchestrator.model.transformer import Transformer
from orchestrator.text.tokenizer import Tokenizer


class Killed(BaseException):
    """Raised in a worker of a test to have it end without a word."""


class Worker:
    """Attributes:
    number: by which the supervisor knows it, whatever its rank. rank: what it is, or was last.
    engine: with the requests, through all epochs. desk: between them and the supervisor.
    drafts: experts of the draft stages, None where every rank has all of them.
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
        launcher: Launcher | None = None,
        desk: Callable[[Engine, Mailbox], Requests] = Desk,
        wrap: Callable[[Communicator], Communicator] | None = None,
        delays: Delays | None = None,
    ) -> None:
        """launcher: where device work of overlapped steps goes; None for what the engine takes by itself.

        desk: makes what takes requests and tells what becomes of them.
        """
        self.number = number
        self.options, self.model = options.resolved(model.config), model
        self.source: ExpertSource = source
        self.mailbox, self.planner, self.wrap, self.delays = mailbox, planner, wrap, delays
        config, slots, spares = model.config, self.options.slots, self.options.spares
        assert slots is not None and spares is not None
        self.slots, self.spares = slots, spares
        shapes = ExpertShapes.of(config.hidden_size, config.moe_intermediate_size)
        buffers = config.num_hidden_layers * slots + spares
        self.pool: BufferPool
        if model.device.type == "cuda":
            self.pool = PackedPool(config.hidden_size, config.moe_intermediate_size, buffers, model.device)
            packed = isinstance(source, LoadedPacked)
            self.source = source if packed else PackedSource(source, shapes, model.device)
        else:
            self.pool = ExpertPool(shapes, buffers)
        self.held: HeldExperts | None = None
        self.engine = Engine(model, tokenizer, self.options.engine)
        if launcher is not None:
            self.engine.overlap(launcher)
        self.drafts: DraftExperts | None = None
        if self.engine.runner.drafter is not None and self.options.spread_drafts:
            self.drafts = DraftExperts(config, slots, source)
        self.desk = desk(self.engine, mailbox)
        self.rank: Rank | None = None
        self.loads: np.ndarray | None = None  # of the last epoch in which counts were gathered

    def run(self) -> None:
        """Serve epochs until told to leave."""
        self.mailbox.send(Up(os.getpid(), self.model.weights.bytes_read, self.desk.layout))
        message: Any = None
        while not isinstance(message, Leave):
            if isinstance(message, Form):
                message = self._epoch(message)
                continue
            message = self.mailbox.recv()
            if not isinstance(message, Form | Leave):  # between two epochs
                self.desk.take(message)

    def _epoch(self, form: Form) -> Form | Leave | None:
        """Be a rank until the epoch ends; returns the message that ended it, None where a failure did."""
        try:
            rank = self.rank = Rank(self, form)
        except CommError as error:
            self.mailbox.send(_broke(form.epoch, error))
            return None
        try:
            ended = rank.serve()
        except CommError as error:
            self._leave(rank)
            self.mailbox.send(_broke(form.epoch, error))
            return None
        except BaseException:
            rank.close()
            raise
        self._leave(rank)
        return ended

    def _leave(self, rank: Rank) -> None:
        """End an epoch: what steps had brought by then is told, the one that was under way is taken back."""
        rank.close()
        self.desk.tell(self.engine.take_events())


def _broke(epoch: int, error: CommError) -> Broke:
    return Broke(epoch, str(error), error.waiting_for if isinstance(error, PeerTimeout) else ())


def failure(error: BaseException) -> Failed:
    """What a worker says when it cannot go on."""
    return Failed(f"{type(error).__name__}: {error}")
