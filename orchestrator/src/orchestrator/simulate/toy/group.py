"""Experts of a decode group: the real coordinator and the real ranks' bookkeeping, with weights of four bytes.

Plans run beside the steps: messages and copies take their time and overtake each other, a turn reaches all ranks with
the step. Before each step every rank has to have the same table, every expert a copy, every slot the weights it names.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from orchestrator.balance.eplb import Coordinator, EplbSettings, Placement, RankSlots, initial, plan
from orchestrator.balance.eplb.messages import Acknowledge, Chunk, Prepare
from orchestrator.balance.eplb.moves import CHECKPOINT
from orchestrator.balance.eplb.rank_slots import Copy, gather
from orchestrator.simulate.queue import EventQueue

LAYERS, EXPERTS, EXPERT_BYTES = 1, 8, 4
_EVERY = 24
"""Steps between two plans."""
_PATIENCE = 40
_SETTINGS = EplbSettings(redundant=1, window=4, interval=_EVERY, least_gain=0.0, least_tokens=0.0)


def slots_for(fewest: int) -> int:
    """Slots a rank so that `fewest` ranks hold all experts, and one more as long as not every rank holds all."""
    return min(EXPERTS, -(-EXPERTS // fewest) + 1)


class ExpertGroup:
    """The ranks of one group.

    Args:
        wrong: called with an invariant's number and what is wrong.

    Attributes:
        coordinator: of plans. ranks: that live. deaf: ranks on which no copy ends. steps: of each rank.
    """

    def __init__(
        self, name: str, ranks: int, fewest: int, queue: EventQueue, random: Random, wrong: Callable[[int, str], None]
    ) -> None:
        self.name, self._queue, self._random, self._wrong = name, queue, random, wrong
        slots = slots_for(fewest)
        placement = initial(LAYERS, EXPERTS, ranks, slots)
        self.coordinator = Coordinator(placement, EXPERT_BYTES, bytes_per_step=8, spares=slots, patience=_PATIENCE)
        self.ranks = {rank: RankSlots(rank, placement, slots) for rank in range(ranks)}
        self._memory = {rank: np.full((2 * slots, EXPERT_BYTES), -1, np.int64) for rank in self.ranks}
        for rank, held in self.ranks.items():
            for slot, expert in enumerate(placement.experts[0, rank]):
                if expert >= 0:
                    self._memory[rank][held.live[0, slot]] = _weights(int(expert))
        self.deaf: set[int] = set()
        self.steps = dict.fromkeys(self.ranks, 0)
        self._number, self._life = 0, 0
        self._unsure = True  # something has changed since the last full check

    @property
    def version(self) -> int:
        return self.coordinator.version

    @property
    def complete(self) -> bool:
        """Whether every expert has a copy; no step runs before."""
        return bool((self.coordinator.placement.copies() > 0).all())

    def step(self) -> None:
        """What belongs before a step, on all ranks; and the step."""
        self._turn()
        for rank in self.ranks:
            self.steps[rank] += 1
        self._check()
        if self._number % _EVERY == 0 and not self.coordinator.busy and len(self.ranks) > 1:
            self._offer()

    def died(self, rank: int) -> None:
        """A rank is gone, maybe amid a turn that only some have seen."""
        turn = self.coordinator.turn(self._number)
        self._number += 1
        for other, held in self.ranks.items():
            if other != rank and self._random.random() < 0.5:
                held.begin(turn)
        del self.ranks[rank]
        self.deaf.discard(rank)
        if self.ranks:
            self.coordinator.died(rank)
        self._life += 1
        self._unsure = True

    def begin_again(self) -> None:
        """The ranks that live start anew from what they hold, and plan what is missing."""
        if not self.ranks:
            return
        held = gather(list(self.ranks.values()), self.coordinator.placement)
        self.coordinator.restart(held, self._number)
        self.steps = dict.fromkeys(self.ranks, 0)
        self._life += 1

    def load(self) -> bool:
        """One turn without a step, to bring in what is missing; whether all experts are there now."""
        if not self.complete and not self.coordinator.busy:
            self._repair()
        self._turn()
        return self.complete

    def _turn(self) -> None:
        self._number += 1
        turn = self.coordinator.turn(self._number)
        for rank, held in self.ranks.items():
            held.begin(turn)
            self._start(rank, held.completed(self._number - 1))
        messages: tuple[Prepare | Chunk, ...] = (*turn.prepares, *turn.chunks)
        for message in messages:
            self._send(_receiver(message), message)
        self._unsure = self._unsure or bool(turn.flips) or turn.held is not None

    def _offer(self) -> None:
        loads = np.array([[[self._random.random() ** 3 * 50 for _ in range(EXPERTS)]] for _ in range(4)], np.float32)
        decision = plan(loads, self.coordinator.placement, _SETTINGS, self.coordinator.alive)
        if decision.moves:
            self.coordinator.offer(decision.placement, self._number)

    def _repair(self) -> None:
        nothing = np.zeros((0, LAYERS, EXPERTS), np.float32)
        decision = plan(nothing, self.coordinator.placement, _SETTINGS, self.coordinator.alive)
        if decision.moves:
            self.coordinator.offer(decision.placement, self._number)

    # Messages and copies, by the clock

    def _send(self, rank: int, message: object) -> None:
        self._queue.after(0.4 * self._random.random() ** 2, self._arrive, self._life, rank, message)

    def _arrive(self, life: int, rank: int, message: Any) -> None:
        held = self.ranks.get(rank)
        if held is None:
            return
        if isinstance(message, Copy):  # a copy under way ends, whatever became of its plan
            if rank in self.deaf:
                self._queue.after(1.0, self._arrive, life, rank, message)
                return
            self._write(rank, message)
            acknowledged, started = held.arrived(message, EXPERT_BYTES)
            self._acknowledge(acknowledged)
            self._start(rank, started)
        elif life != self._life:
            return
        elif isinstance(message, Prepare):
            self._acknowledge(held.prepare(message, EXPERT_BYTES))
        elif isinstance(message, Chunk):
            self._start(rank, held.copy(message))
        elif isinstance(message, Acknowledge):
            self.coordinator.acknowledge(message, self._number)

    def _acknowledge(self, messages: list[Acknowledge]) -> None:
        for message in messages:
            self._send(message.rank, message)

    def _start(self, rank: int, copies: list[Copy]) -> None:
        for copy in copies:
            if copy.buffer in self.ranks[rank].live:
                self._wrong(6, f"{self.name}: rank {rank} copies into a slot that is read")
            self._send(rank, copy)

    def _write(self, rank: int, copy: Copy) -> None:
        chunk, move = copy.chunk, copy.chunk.move
        part = slice(chunk.offset, chunk.offset + chunk.length)
        if copy.buffer in self.ranks[rank].live:
            self._wrong(6, f"{self.name}: rank {rank} writes into a slot that is read")
        if move.source_rank == CHECKPOINT:
            self._memory[rank][copy.buffer][part] = _weights(move.expert)[part]
        elif move.source_rank in self.ranks:
            source = self.ranks[move.source_rank].live[chunk.layer, move.source_slot]
            self._memory[rank][copy.buffer][part] = self._memory[move.source_rank][source][part]

    def _check(self) -> None:
        """Invariant 6. Tables and weights change at flips only; copies into spare buffers cannot reach a slot."""
        if len(set(self.steps.values())) > 1:
            self._wrong(6, f"{self.name}: ranks are at steps {self.steps}")
        if not self._unsure:
            return
        self._unsure = False
        placement: Placement = self.coordinator.placement
        if not self.complete:
            self._wrong(6, f"{self.name}: a step without experts {np.flatnonzero(placement.copies()[0] == 0).tolist()}")
        for rank, held in self.ranks.items():
            if not (held.table == placement.experts).all():
                self._wrong(6, f"{self.name}: rank {rank} routes by another table than plan {self.version}")
            for slot, expert in enumerate(placement.experts[0, rank]):
                if expert >= 0 and not (self._memory[rank][held.live[0, slot]] == _weights(int(expert))).all():
                    self._wrong(6, f"{self.name}: rank {rank}, slot {slot} does not hold expert {expert}")


def _weights(expert: int) -> np.ndarray:
    """Bytes that tell the expert and the place."""
    return 100 * expert + np.arange(EXPERT_BYTES)


def _receiver(message: Prepare | Chunk) -> int:
    return message.rank if isinstance(message, Prepare) else message.move.rank
