"""A group of ranks with weights, links that delay, and a check of every step: what a move's history has to survive."""

from __future__ import annotations

import random

import numpy as np

from orchestrator.balance.eplb import Coordinator, Placement, RankSlots
from orchestrator.balance.eplb.messages import Acknowledge, Chunk, Prepare, Turn
from orchestrator.balance.eplb.moves import CHECKPOINT
from orchestrator.balance.eplb.rank_slots import Copy, gather

EXPERT_BYTES = 6


def weights(layer: int, expert: int) -> np.ndarray:
    """Bytes that tell layer, expert and place."""
    return 1_000_000 * (layer + 1) + 100 * expert + np.arange(EXPERT_BYTES)


class Group:
    """Ranks in lockstep. Messages and copies wait a random number of steps, and may overtake each other."""

    def __init__(self, placement: Placement, *, spares: int, bytes_per_step: int, patience: int, seed: int, delay: int):
        self.rng = random.Random(seed)
        self.delay, self.bytes_per_step = delay, bytes_per_step
        self.coordinator = Coordinator(
            placement, EXPERT_BYTES, bytes_per_step=bytes_per_step, spares=spares, patience=patience
        )
        self.ranks = {rank: RankSlots(rank, placement, spares) for rank in range(placement.ranks)}
        held = placement.layers * placement.slots
        self.memory = {rank: np.zeros((held + spares, EXPERT_BYTES), np.int64) for rank in self.ranks}
        for rank, slots in self.ranks.items():
            for layer, slot in np.argwhere(placement.experts[:, rank] >= 0):
                self.memory[rank][slots.live[layer, slot]] = weights(layer, placement.experts[layer, rank, slot])
        self.flying: list[tuple[int, int, object]] = []  # (step when due, rank, message)
        self.deaf: set[int] = set()  # ranks whose copies never end
        self.step = 0
        self.reading: dict[int, np.ndarray] = {rank: slots.live.ravel().copy() for rank, slots in self.ranks.items()}

    def send(self, rank: int, message: object) -> None:
        self.flying.append((self.step + self.rng.randint(0, self.delay), rank, message))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            turn = self.coordinator.turn(self.step)
            self.bounded(turn)
            for slots in self.ranks.values():
                slots.begin(turn)
            for prepare in turn.prepares:
                self.send(prepare.rank, prepare)
            for chunk in turn.chunks:
                self.send(chunk.move.rank, chunk)
            # The step before was launched but may still run when this one's turn is applied.
            for rank, slots in self.ranks.items():
                self.reading[rank] = np.union1d(self.reading[rank], slots.live)
            self.deliver()
            self.check()
            for rank, slots in self.ranks.items():
                self.reading[rank] = slots.live.ravel().copy()
                self.start(rank, slots.completed(self.step - 1))
            self.step += 1

    def deliver(self) -> None:
        due = [item for item in self.flying if item[0] <= self.step]
        self.flying = [item for item in self.flying if item[0] > self.step]
        self.rng.shuffle(due)
        for _, rank, message in due:
            if rank not in self.ranks:
                continue
            slots = self.ranks[rank]
            if isinstance(message, Prepare):
                self.acknowledge(slots.prepare(message, EXPERT_BYTES))
            elif isinstance(message, Chunk):
                self.start(rank, slots.copy(message))
            elif isinstance(message, Acknowledge):
                self.coordinator.acknowledge(message, self.step)
            elif isinstance(message, Copy):
                if rank in self.deaf:
                    self.flying.append((self.step + 1, rank, message))
                    continue
                self.write(rank, message)
                acknowledged, started = slots.arrived(message, EXPERT_BYTES)
                self.acknowledge(acknowledged)
                self.start(rank, started)

    def acknowledge(self, messages: list[Acknowledge]) -> None:
        for message in messages:
            self.send(message.rank, message)

    def start(self, rank: int, copies: list[Copy]) -> None:
        for copy in copies:
            # The running step still reads its slots: nothing may be written there.
            assert copy.buffer not in self.reading[rank]
            assert copy.buffer not in self.ranks[rank].live
            self.send(rank, copy)

    def write(self, rank: int, copy: Copy) -> None:
        chunk, move = copy.chunk, copy.chunk.move
        part = slice(chunk.offset, chunk.offset + chunk.length)
        assert copy.buffer not in self.ranks[rank].live and copy.buffer not in self.reading[rank]
        if move.source_rank == CHECKPOINT:
            self.memory[rank][copy.buffer][part] = weights(chunk.layer, move.expert)[part]
        elif move.source_rank in self.ranks:
            source = self.ranks[move.source_rank].live[chunk.layer, move.source_slot]
            self.memory[rank][copy.buffer][part] = self.memory[move.source_rank][source][part]

    def bounded(self, turn: Turn) -> None:
        received, sent = dict.fromkeys(self.ranks, 0), dict.fromkeys(self.ranks, 0)
        for chunk in turn.chunks:
            received[chunk.move.rank] += chunk.length  # a KeyError here is a transfer posted to a dead rank
            if chunk.move.source_rank != CHECKPOINT:
                sent[chunk.move.source_rank] += chunk.length
        assert max([*received.values(), *sent.values()]) <= self.bytes_per_step

    def check(self) -> None:
        """Same routing everywhere, every slot with the bytes that it says, every expert routed to where it is."""
        experts = self.coordinator.placement.experts
        for rank, slots in self.ranks.items():
            assert (slots.table == experts).all()
            for layer in range(experts.shape[0]):
                for slot, expert in enumerate(experts[layer, rank]):
                    if expert >= 0:
                        held = self.memory[rank][slots.live[layer, slot]]
                        assert (held == weights(layer, expert)).all(), (self.step, rank, layer, slot)
        if (self.coordinator.placement.copies() == 0).any():
            return  # after a failure, before the repair: such an engine does not serve
        every = np.arange(self.coordinator.placement.num_experts)[:, None]
        for rank, slots in self.ranks.items():
            for layer in range(experts.shape[0]):
                chosen = slots.routing(layer).choose(every, rank, every[:, 0] + self.step)[:, 0]
                named = experts[layer].ravel()[chosen]
                assert (named == every[:, 0]).all()
                assert self.coordinator.alive[chosen // experts.shape[2]].all()

    def kill(self, rank: int) -> None:
        """The engine fails with the rank, perhaps amid a turn, and starts again with the others."""
        turn = self.coordinator.turn(self.step)
        for other in sorted(self.ranks):
            if other != rank and self.rng.random() < 0.5:
                self.ranks[other].begin(turn)
        del self.ranks[rank]
        self.coordinator.died(rank)
        self.flying = [item for item in self.flying if item[1] != rank]
        self.coordinator.restart(gather(list(self.ranks.values()), self.coordinator.placement), self.step)
        self.step += 1
