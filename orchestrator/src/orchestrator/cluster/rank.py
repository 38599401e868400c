"""A worker in one epoch: a rank of an expert-parallel group."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from orchestrator.balance.eplb.coordinator import Coordinator
from orchestrator.balance.eplb.domains import Domain, of_members
from orchestrator.balance.eplb.placement import EMPTY, Placement, initial
from orchestrator.balance.eplb.rank_slots import RankSlots
from orchestrator.cluster.agreement import Agreement
from orchestrator.cluster.counts import StepCounts
from orchestrator.cluster.gpu_counts import GpuStepCounts
from orchestrator.cluster.leader import Leader
from orchestrator.cluster.links import Pair
from orchestrator.cluster.messages import Balance, Form, Leave, Left, Serving
from orchestrator.cluster.mover import Mover
from orchestrator.engine.lockstep import Lockstep
from orchestrator.model.expert_parallel import HeldExperts, attach, attach_drafts, attach_packed, fill

if TYPE_CHECKING:
    from ep_comm import Communicator
    from orchestrator.cluster.worker import Worker

_IDLE_S = 0.002  # between agreements while no rank has work


class Rank:
    """Collective from beginning to end: raises `CommError` where another rank does not come."""

    def __init__(self, worker: Worker, form: Form) -> None:
        self.worker, self.form, self._began = worker, form, time.perf_counter()
        self.mailbox, self.engine, self.desk = worker.mailbox, worker.engine, worker.desk
        self.rank = form.members.index(worker.number)
        self._serving, self._balance = False, Balance(form.epoch)
        self.links: Pair = form.links.open(self.rank)
        try:
            self._enter()
        except BaseException:
            self.links.close()
            raise

    def _enter(self) -> None:
        worker, options, config = self.worker, self.worker.options, self.worker.model.config
        held, first = self._survey()
        before = None if worker.held is None else worker.held.slots.live
        slots = RankSlots(self.rank, held, worker.spares, before)
        worker.held = self.held = HeldExperts(slots, worker.pool)
        self.held.change = self.engine.flip
        self.read = fill(self.held, worker.source) if first else 0
        experts, chosen = config.n_routed_experts, config.num_experts_per_tok
        sizes = (config.num_hidden_layers, experts, chosen, options.eplb.window, options.statistics)
        on_gpu = worker.model.device.type == "cuda"
        self.counts = GpuStepCounts(*sizes, device=worker.model.device) if on_gpu else StepCounts(*sizes)
        domain = of_members(options.domain, self.form.members)
        self.mover = Mover(self.held, self.links.moves, worker.source, worker.delays, domain)
        self.leader = self._leader(held, domain) if self.rank == 0 else None
        lag = int(self.engine.pipeline is not None)
        self.agreement = Agreement(
            self.links.control, self.held, self.counts, self.mover, options.eplb, self.leader, lag
        )
        data = self.links.data if worker.wrap is None else worker.wrap(self.links.data)
        if isinstance(self.counts, GpuStepCounts):
            attach_packed(worker.model, data, self.held, self.counts.on_device, self.links.fused)
            self.engine.forget_graphs(warm_ups=0)  # a run for warmth would be a collective that nobody else makes
        else:
            attach(worker.model, data, self.held, self.counts, options.combine)
        self._enter_drafts(data)
        self.engine.runner.watch = self.counts
        self.engine.lockstep = Lockstep(self.agreement)

    def _enter_drafts(self, data: Communicator) -> None:
        drafts, drafter = self.worker.drafts, self.engine.runner.drafter
        if drafts is None or drafter is None:
            return
        before = drafts.bytes_read
        tables = self._gathered(drafts.table)
        attach_drafts(drafter, data, drafts.take(drafts.place(tables), self.rank), self.worker.options.combine)
        self.read += drafts.bytes_read - before

    def _gathered(self, mine: np.ndarray) -> np.ndarray:
        """All ranks' arrays of the same shape, int64 [ranks, ...]."""
        row = torch.from_numpy(mine.reshape(-1).astype(np.int64))
        parts = [self.links.control.all_gather(part.contiguous()) for part in row.split(65536)]
        return torch.cat(parts, 1).numpy().reshape(-1, *mine.shape)

    def _survey(self) -> tuple[Placement, bool]:
        """What the ranks hold together, and whether they hold nothing yet."""
        config, slots = self.worker.model.config, self.worker.slots
        layers, experts = config.num_hidden_layers, config.n_routed_experts
        mine = np.full((layers, slots), EMPTY, np.int64)
        if self.worker.held is not None:
            old = self.worker.held.slots
            mine[:] = old.table[:, old.rank]
        rows = self._gathered(mine)
        if (rows == EMPTY).all():
            return initial(layers, experts, len(rows), slots), True
        return Placement(np.ascontiguousarray(rows.transpose(1, 0, 2)).astype(np.int32), experts), False

    def _leader(self, held: Placement, domain: Domain) -> Leader:
        options, worker = self.worker.options, self.worker
        start = initial(held.layers, held.num_experts, held.ranks, held.slots)
        coordinator = Coordinator(
            start, worker.pool.expert_bytes,
            bytes_per_step=options.bytes_per_step, spares=worker.spares, patience=options.patience, domain=domain,
        )  # fmt: skip
        leader = Leader(coordinator, options.eplb, worker.planner(), domain)
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
            self.desk.tell(self.engine.step())
            self._note_serving()
            self._note_balance()
            if self.agreement.over:
                self._say_goodbye()
                self.mailbox.poll(self.worker.options.timeout)  # for all others: who still reads may not find us gone
                return Leave()
            assert self.engine.lockstep is not None
            if not self.engine.lockstep.runs:
                self.mailbox.poll(_IDLE_S)

    def close(self) -> None:
        """Have what runs end, in an error if it waits for others, take it back, and give the links up."""
        self.links.data.abort(f"rank {self.rank} leaves epoch {self.form.epoch}")
        try:
            self.engine.settle()
        finally:
            self.links.close()
            if self.leader is not None:
                self.leader.planner.close()
        if self.agreement.loads is not None:
            self.worker.loads = self.agreement.loads

    def _read_mail(self) -> Form | None:
        while self.mailbox.poll(0):
            message = self.mailbox.recv()
            if isinstance(message, Form):
                return message
            if isinstance(message, Leave):
                self.agreement.leaving = True
            else:
                self.desk.take(message)
        return None

    def _note_serving(self) -> None:
        if self.agreement.complete and not self._serving:
            self._serving = True
            counts, seconds = self.mover.counts, time.perf_counter() - self._began
            read = self.read + counts["from the checkpoint"]
            self.mailbox.send(Serving(self.form.epoch, seconds, counts["from peers"], read))

    def _note_balance(self) -> None:
        leader = self.leader
        if leader is None:
            return
        lb = leader.lb[-1] if leader.lb else 0.0
        now = Balance(self.form.epoch, lb, dict(leader.lb_of), dict(leader.coordinator.counts))
        if now != self._balance:
            self._balance = now
            self.mailbox.send(now)

    def _say_goodbye(self) -> None:
        leader = self.leader
        self.mailbox.send(
            Left(
                steps=self.agreement.ran,
                collectives=self.links.data.epoch,
                prompt_tokens=self.engine.stats.prompt_tokens,
                counted={str(kind): steps for kind, steps in self.counts.steps.items()},
                moe_lb=() if leader is None else tuple(leader.lb),
                moe_lb_of={} if leader is None else dict(leader.lb_of),
                plans={} if leader is None else dict(leader.coordinator.counts),
                bytes_moved=dict(self.mover.counts),
                digests=self.held.digests(),
            )
        )
