"""One rank's side of a move: which buffer is which slot, what may be written, what has arrived. No I/O.

A slot's weights lie in a buffer; a flip exchanges the buffer's number for that of a spare one, so no byte is copied
twice. The buffer that a slot gave up may still be read by the step before the flip: it becomes spare when that step has
ended. One that a copy is still being written to (of a dropped plan, perhaps) stays taken until the copy says so.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.messages import Acknowledge, Chunk, Dropped, Flip, Prepare, Turn
from orchestrator.balance.eplb.placement import Placement
from orchestrator.balance.eplb.routing import RoutingTable, routing_table


@dataclass(frozen=True)
class Copy:
    """For the mover: bytes of a chunk into a buffer of this rank. It calls `RankSlots.arrived` when they are there."""

    chunk: Chunk
    buffer: int


class RankSlots:
    """Buffers of one rank; 0 to layers x slots - 1 are the slots at the start, the spare ones are behind them.

    Attributes:
        live: int64 [layers, slots], the buffer of each slot.
        num_experts: logical experts a layer.
        table: int32 [layers, ranks, slots], what routing says on this rank.
        counts: "flipped", "ignored" (chunks and turns of dropped versions).
    """

    def __init__(self, rank: int, placement: Placement, spares: int, live: np.ndarray | None = None) -> None:
        """`live` is where a rank that had another number before has its slots; None for the order of slots."""
        require(0 <= rank < placement.ranks, "rank", rank, f"0 to {placement.ranks - 1}")
        require(spares > 0, "spares", spares, "1 or more")
        held = placement.layers * placement.slots
        self.rank = rank
        self.live = np.arange(held).reshape(placement.layers, placement.slots) if live is None else live.copy()
        require(self.live.shape == (placement.layers, placement.slots), "live", self.live.shape, "[layers, slots]")
        self.table = placement.experts.copy()
        self.counts: Counter[str] = Counter()
        self.num_experts = placement.num_experts
        self._routing: dict[int, RoutingTable] = {}
        self._free = deque(sorted(set(range(held + spares)) - set(self.live.ravel().tolist())))
        self._retired: list[tuple[int, int]] = []  # (last step that reads it, buffer)
        self._prepares: dict[tuple[int, int], Prepare] = {}
        self._staged: dict[tuple[int, int, int], int] = {}  # (version, layer, slot) -> buffer
        self._arrived: Counter[tuple[int, int, int]] = Counter()  # bytes
        self._writing: Counter[int] = Counter()  # copies under way, by buffer
        self._orphans: set[int] = set()  # dropped while being written
        self._queue: deque[Chunk] = deque()  # chunks without a buffer yet
        self._acknowledged: set[tuple[int, int]] = set()
        self._oldest = 0  # versions up to this one are over

    @property
    def spare(self) -> int:
        """Spare buffers that a copy could take now."""
        return len(self._free)

    def routing(self, layer: int) -> RoutingTable:
        """The routing of a layer at this step."""
        if layer not in self._routing:
            self._routing[layer] = routing_table(self.table[layer], self.num_experts)
        return self._routing[layer]

    def begin(self, turn: Turn) -> None:
        """Apply a turn's flips, before its step runs and after the step before was launched.

        Raises:
            RuntimeError: a flip's bytes are not here. The step must not run: routing would name missing weights.
        """
        for dropped in turn.dropped:
            self._forget(dropped)
        if turn.held is not None:
            self.table, self._routing = turn.held.copy(), {}
        for flip in turn.flips:
            self._flip(flip, turn.step)

    def prepare(self, message: Prepare, expert_bytes: int) -> list[Acknowledge]:
        """Learn a layer's moves; the bytes may have come before."""
        if message.version <= self._oldest:
            self.counts["ignored"] += 1
            return []
        self._prepares[message.version, message.layer] = message
        return self._ready(message.version, message.layer, expert_bytes)

    def copy(self, chunk: Chunk) -> list[Copy]:
        """Copies to start now; the chunk waits where no spare buffer is free."""
        if chunk.version <= self._oldest:
            self.counts["ignored"] += 1
            return []
        self._queue.append(chunk)
        return self._start()

    def arrived(self, copy: Copy, expert_bytes: int) -> tuple[list[Acknowledge], list[Copy]]:
        """A copy has been written. Returns acknowledgements to send and waiting copies to start."""
        chunk = copy.chunk
        self._writing[copy.buffer] -= 1
        if copy.buffer in self._orphans:
            if self._writing[copy.buffer] == 0:
                self._orphans.discard(copy.buffer)
                self._free.append(copy.buffer)
            return [], self._start()
        self._arrived[chunk.version, chunk.layer, chunk.move.slot] += chunk.length
        return self._ready(chunk.version, chunk.layer, expert_bytes), []

    def completed(self, step: int) -> list[Copy]:
        """A step has ended on the device: buffers that it read last are spare. Returns copies to start."""
        free = [buffer for last, buffer in self._retired if last <= step]
        self._retired = [(last, buffer) for last, buffer in self._retired if last > step]
        self._free.extend(free)
        return self._start()

    def _start(self) -> list[Copy]:
        found, waiting = [], deque[Chunk]()
        for chunk in self._queue:
            key = (chunk.version, chunk.layer, chunk.move.slot)
            if key not in self._staged:
                if not self._free:
                    waiting.append(chunk)
                    continue
                self._staged[key] = self._free.popleft()
            self._writing[self._staged[key]] += 1
            found.append(Copy(chunk, self._staged[key]))
        self._queue = waiting
        return found

    def _ready(self, version: int, layer: int, expert_bytes: int) -> list[Acknowledge]:
        prepare = self._prepares.get((version, layer))
        if prepare is None or (version, layer) in self._acknowledged:
            return []
        if any(self._arrived[version, layer, move.slot] < expert_bytes for move in prepare.moves):
            return []
        self._acknowledged.add((version, layer))
        return [Acknowledge(version, layer, self.rank)]

    def _flip(self, flip: Flip, step: int) -> None:
        mine = [move for move in flip.moves if move.rank == self.rank]
        if (flip.version, flip.layer) not in self._acknowledged:
            raise RuntimeError(f"rank {self.rank}: layer {flip.layer} of plan {flip.version} flips but was not ready")
        for move in mine:
            buffer = self._staged.pop((flip.version, flip.layer, move.slot))
            self._arrived.pop((flip.version, flip.layer, move.slot))
            self._retired.append((step - 1, int(self.live[flip.layer, move.slot])))
            self.live[flip.layer, move.slot] = buffer
        self._prepares.pop((flip.version, flip.layer))
        self._acknowledged.discard((flip.version, flip.layer))
        self.table[flip.layer] = flip.table
        self._routing.pop(flip.layer, None)
        self.counts["flipped"] += 1

    def _forget(self, dropped: Dropped) -> None:
        self._oldest = max(self._oldest, dropped.version)
        for key in [k for k in self._staged if k[0] <= self._oldest]:
            buffer = self._staged.pop(key)
            if self._writing[buffer]:
                self._orphans.add(buffer)
            else:
                self._free.append(buffer)
        self._arrived = Counter({k: v for k, v in self._arrived.items() if k[0] > self._oldest})
        self._prepares = {k: v for k, v in self._prepares.items() if k[0] > self._oldest}
        self._acknowledged = {k for k in self._acknowledged if k[0] > self._oldest}
        self._queue = deque(c for c in self._queue if c.version > self._oldest)


def gather(ranks: Sequence[RankSlots], like: Placement) -> Placement:
    """What the given ranks hold, each by its own table: where a failed engine begins again. Others' slots are empty."""
    experts = np.full_like(like.experts, -1)
    for slots in ranks:
        experts[:, slots.rank] = slots.table[:, slots.rank]
    return Placement(experts, like.num_experts)
