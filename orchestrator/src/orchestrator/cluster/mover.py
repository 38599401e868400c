"""Expert weights on their way between ranks: bytes into spare buffers while steps go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from orchestrator.balance.eplb.domains import Domain, domains
from orchestrator.balance.eplb.messages import Acknowledge, Chunk, Prepare, Turn
from orchestrator.balance.eplb.moves import CHECKPOINT
from orchestrator.balance.eplb.rank_slots import Copy
from orchestrator.model.expert_parallel import ExpertSource, HeldExperts

if TYPE_CHECKING:
    from ep_comm import Communicator, Moving

_TAGS = 2**30
_PIECES = 4  # of one expert's bytes, at most

Delays = Callable[[str], int]
"""Agreements by which an event is held back: "prepare", "chunk", "arrived" or "acknowledge". For tests."""


class Mover:
    """One rank's. All ranks are given the same turns, so both sides of a transfer number it alike.

    Attributes:
        counts: bytes "from peers", those of them "from other domains", "within the rank", "from the checkpoint".
    """

    def __init__(
        self,
        held: HeldExperts,
        link: Communicator,
        source: ExpertSource,
        delays: Delays | None = None,
        domain: Domain = 0,
    ) -> None:
        """domain: ranks that share fast links, as in `MoveLimits`; 0 for all."""
        self.held, self._link, self._source = held, link, source
        self._domains = domains(domain, held.slots.table.shape[1])
        self.counts: Counter[str] = Counter()
        self._delays = delays or (lambda kind: 0)
        self._now, self._issued = 0, 0
        self._tags: dict[tuple[int, int, int, int], int] = {}  # of chunks into this rank that have not started
        self._receiving: list[tuple[Copy, Moving]] = []
        self._sending: list[Moving] = []
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._acknowledged: list[Acknowledge] = []
        self._read: tuple[int, int, torch.Tensor] | None = None

    def begin(self, turn: Turn) -> None:
        """Start what a turn asks of this rank."""
        rank, size = self.held.rank, self.held.pool.expert_bytes
        for prepare in turn.prepares:
            if prepare.rank == rank:
                self._after("prepare", partial(self._prepare, prepare, size))
        for chunk in turn.chunks:
            tag, self._issued = self._issued % _TAGS, self._issued + _PIECES
            move = chunk.move
            if move.rank == rank:
                self._tags[_key(chunk)] = tag
                self._after("chunk", partial(self._copy, chunk))
            elif move.source_rank == rank:
                buffer = int(self.held.slots.live[chunk.layer, move.source_slot])
                self._sending.append(self._link.move(self._transfers(chunk, buffer, tag)))

    def poll(self) -> None:
        """Note what has arrived, and do what was held back until now."""
        self._now += 1
        due = [do for at, do in self._later if at <= self._now]
        self._later = [(at, do) for at, do in self._later if at > self._now]
        for do in due:
            do()
        self._sending = [moving for moving in self._sending if not moving.done()]
        waiting, self._receiving = self._receiving, []
        for copy, moving in waiting:
            if moving.done():
                self.counts["from peers"] += copy.chunk.length
                if self._domains[copy.chunk.move.source_rank] != self._domains[self.held.rank]:
                    self.counts["from other domains"] += copy.chunk.length
                self._arrive(copy)
            else:
                self._receiving.append((copy, moving))

    def completed(self, step: int) -> None:
        """A step has ended: buffers that it read last may be written."""
        self._start(self.held.slots.completed(step))

    def acknowledgement(self) -> Acknowledge | None:
        """The next one to hand to the coordinator."""
        return self._acknowledged.pop(0) if self._acknowledged else None

    def _after(self, kind: str, do: Callable[[], None]) -> None:
        delay = self._delays(kind)
        if delay > 0:
            self._later.append((self._now + delay, do))
        else:
            do()

    def _prepare(self, prepare: Prepare, size: int) -> None:
        self._acknowledge(self.held.slots.prepare(prepare, size))

    def _copy(self, chunk: Chunk) -> None:
        self._start(self.held.slots.copy(chunk))

    def _acknowledge(self, messages: list[Acknowledge]) -> None:
        for message in messages:
            self._after("acknowledge", partial(self._acknowledged.append, message))

    def _start(self, copies: list[Copy]) -> None:
        for copy in copies:
            chunk, move = copy.chunk, copy.chunk.move
            tag = self._tags.pop(_key(chunk))
            if move.source_rank == CHECKPOINT:
                data = self._bytes_of(chunk.layer, move.expert)[chunk.offset : chunk.offset + chunk.length]
                self.held.pool.write(copy.buffer, chunk.offset, data)
                self.counts["from the checkpoint"] += chunk.length
                self._arrive(copy)
            elif move.source_rank == self.held.rank:
                pool, buffer = self.held.pool, int(self.held.slots.live[chunk.layer, move.source_slot])
                there = pool.pieces(copy.buffer, chunk.offset, chunk.length)
                for to, piece in zip(there, pool.pieces(buffer, chunk.offset, chunk.length), strict=True):
                    to.copy_(piece)
                self.counts["within the rank"] += chunk.length
                self._arrive(copy)
            else:
                self._receiving.append((copy, self._link.move(self._transfers(chunk, copy.buffer, tag))))

    def _arrive(self, copy: Copy) -> None:
        self._after("arrived", partial(self._arrived, copy))

    def _arrived(self, copy: Copy) -> None:
        acknowledged, copies = self.held.slots.arrived(copy, self.held.pool.expert_bytes)
        self._acknowledge(acknowledged)
        self._start(copies)

    def _transfers(self, chunk: Chunk, buffer: int, tag: int) -> list:  # of ep_comm.Transfer
        from ep_comm import Transfer

        pieces = self.held.pool.pieces(buffer, chunk.offset, chunk.length)
        source, target = chunk.move.source_rank, chunk.move.rank
        return [Transfer((tag + i) % _TAGS, source, target, piece) for i, piece in enumerate(pieces)]

    def _bytes_of(self, layer: int, expert: int) -> torch.Tensor:
        """An expert of the checkpoint; the last one is kept, as its chunks come one after the other."""
        if self._read is None or self._read[:2] != (layer, expert):
            self._read = (layer, expert, self._source.read(layer, expert))
        return self._read[2]


def _key(chunk: Chunk) -> tuple[int, int, int, int]:
    return chunk.version, chunk.layer, chunk.move.slot, chunk.offset
