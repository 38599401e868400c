"""Carries a plan out, layer by layer, between the steps of a running engine. No I/O, no clock but the step.

A layer: its ranks are told their moves, chunks are issued as the bytes of a step allow, every rank alive acknowledges,
the next turn flips it. A plan that gets nowhere for `patience` steps is dropped, counted, and says whom it waited for;
layers that have flipped stay, since every layer is a valid placement by itself.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.domains import Domain
from orchestrator.balance.eplb.messages import Acknowledge, Chunk, Dropped, Flip, Prepare, Turn
from orchestrator.balance.eplb.moves import CHECKPOINT, Move, moves_of
from orchestrator.balance.eplb.placement import Placement, check_alive

_log = logging.getLogger(__name__)


class Coordinator:
    """One an engine.

    Attributes:
        placement: what routing says at this step; plans start from it.
        alive: bool [ranks].
        version: of the running or last plan; rises with every plan.
        counts: "started", "committed", "dropped: stalled", "dropped: rank died", "refused: busy", "late".
        bytes_moved: sum over all chunks issued.
        patience: steps without progress after which a plan is dropped.
    """

    def __init__(
        self,
        placement: Placement,
        expert_bytes: int,
        *,
        bytes_per_step: int,
        spares: int,
        patience: int = 1000,
        alive: np.ndarray | None = None,
        domain: Domain = 0,
    ) -> None:
        """
        Args:
            expert_bytes: bytes of one expert's weights in one layer.
            bytes_per_step: most that one rank receives, and most that one rank sends, in a step.
            spares: spare buffers of one expert a rank.
        """
        for name, value in (("expert_bytes", expert_bytes), ("bytes_per_step", bytes_per_step), ("patience", patience)):
            require(value > 0, name, value, "1 or more")
        require(spares > 0, "spares", spares, "1 or more")
        alive = np.ones(placement.ranks, np.bool_) if alive is None else alive.copy()
        check_alive(alive, placement.ranks)
        placement.check(alive)
        self.placement, self.alive, self.version = placement, alive, 0
        self.counts: Counter[str] = Counter()
        self.bytes_moved = 0
        self._bytes, self._per_step, self._spares = expert_bytes, bytes_per_step, spares
        self.patience, self._domain = patience, domain
        self._target: Placement | None = None
        self._layers: deque[int] = deque()  # of the plan, still to do; the first is under way
        self._moves: tuple[Move, ...] = ()
        self._to_send: deque[tuple[Move, int]] = deque()  # with the bytes already issued
        self._waiting: set[int] = set()
        self._prepared = False
        self._progress = 0
        self._drops: list[Dropped] = []
        self._restarted = False

    @property
    def busy(self) -> bool:
        return self._target is not None

    def offer(self, target: Placement, step: int) -> int | None:
        """Start a plan, and return its version; None where one is running (counted) or nothing differs.

        Raises:
            ValueError: `target` has another shape, leaves an expert out, uses a dead rank, or changes more slots of a
                rank in a layer than there are spare buffers.
        """
        require(target.experts.shape == self.placement.experts.shape, "target", list(target.experts.shape), "the same")
        target.check(self.alive)
        changed = target.experts != self.placement.experts
        most = int(changed[:, self.alive].sum(2).max())
        require(most <= self._spares, "target", f"{most} moves into one rank", f"{self._spares}, the spare buffers")
        if self.busy:
            self.counts["refused: busy"] += 1
            return None
        layers = np.flatnonzero(changed.any((1, 2))).tolist()
        if not layers:
            return None
        self.version += 1
        self.counts["started"] += 1
        self._target, self._layers, self._progress = target, deque(layers), step
        self._start_layer()
        return self.version

    def acknowledge(self, message: Acknowledge, step: int) -> None:
        """A rank has its bytes. Those of another version or layer are counted as late and change nothing."""
        current = self.busy and message.version == self.version and message.layer == self._layers[0]
        if not current or not self._prepared or message.rank not in self._waiting:
            self.counts["late"] += 1
            return
        self._waiting.discard(message.rank)
        self._progress = step

    def died(self, rank: int) -> None:
        """A rank is gone: a running plan is dropped, and nothing is sent to or from that rank again."""
        require(0 <= rank < len(self.alive), "rank", rank, f"0 to {len(self.alive) - 1}")
        self.alive[rank] = False
        if self.busy:
            self._drop("rank died", f"rank {rank} died")

    def restart(self, held: Placement, step: int) -> None:
        """Begin again after a failure from what the ranks alive say they hold; experts may be missing until a plan ran.

        A survivor may or may not have seen the last turn, so what they hold counts, not what was planned.
        """
        require(held.experts.shape == self.placement.experts.shape, "held", list(held.experts.shape), "the same shape")
        if self.busy:
            self._drop("rank died", "the engine restarts")
        self._drops.append(Dropped(self.version, "the engine restarts"))  # a turn that some have not seen may linger
        self.placement, self._progress = held.without(self.alive), step
        self._restarted = True

    def turn(self, step: int) -> Turn:
        """What belongs to the start of this step. Called once for each, before it runs."""
        flips = self._flip(step)
        if self.busy and step - self._progress > self.patience:
            self._drop("stalled", f"no progress for {self.patience} steps; waits for ranks {sorted(self._waiting)}")
        prepares, chunks = self._issue(step) if self.busy else ((), ())
        dropped, self._drops = tuple(self._drops), []
        held, self._restarted = self.placement.experts.copy() if self._restarted else None, False
        return Turn(step, flips, prepares, chunks, dropped, held)

    def _start_layer(self) -> None:
        assert self._target is not None
        layer = self._layers[0]
        now, then = self.placement.experts[layer], self._target.experts[layer]
        self._moves = tuple(moves_of(now, then, self.alive, self._domain))
        self._to_send = deque((move, 0) for move in self._moves)
        self._waiting = set(np.flatnonzero(self.alive).tolist())
        self._prepared = False

    def _flip(self, step: int) -> tuple[Flip, ...]:
        if self._target is None or self._waiting or self._to_send:
            return ()
        layer = self._layers.popleft()
        experts = self.placement.experts.copy()
        experts[layer] = self._target.experts[layer]
        self.placement = Placement(experts, self.placement.num_experts)
        flip = Flip(self.version, layer, experts[layer].copy(), self._moves)
        self._progress = step
        if self._layers:
            self._start_layer()
        else:
            self._target = None
            self.counts["committed"] += 1
        return (flip,)

    def _issue(self, step: int) -> tuple[tuple[Prepare, ...], tuple[Chunk, ...]]:
        layer = self._layers[0]
        prepares: tuple[Prepare, ...] = ()
        if not self._prepared:
            self._prepared = True
            prepares = tuple(
                Prepare(self.version, layer, rank, tuple(m for m in self._moves if m.rank == rank))
                for rank in sorted(self._waiting)
            )
        room_in, room_out = Counter[int](), Counter[int]()  # bytes used
        chunks, later = [], deque[tuple[Move, int]]()
        for move, done in self._to_send:
            room = self._per_step - room_in[move.rank]
            if move.source_rank != CHECKPOINT:
                room = min(room, self._per_step - room_out[move.source_rank])
            length = min(room, self._bytes - done)
            if length > 0:
                chunks.append(Chunk(self.version, layer, move, done, length))
                room_in[move.rank] += length
                room_out[move.source_rank] += length
                self.bytes_moved += length
                self._progress = step
            if done + length < self._bytes:
                later.append((move, done + length))
        self._to_send = later
        return prepares, tuple(chunks)

    def _drop(self, reason: str, detail: str) -> None:
        self.counts[f"dropped: {reason}"] += 1
        _log.warning("expert placement plan %d dropped in layer %d: %s", self.version, self._layers[0], detail)
        self._drops.append(Dropped(self.version, detail))
        self._target, self._layers, self._moves = None, deque(), ()
        self._to_send, self._waiting = deque(), set()
