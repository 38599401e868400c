"""The step agreement of an expert-parallel group, and with it all that has to happen between the same two steps.

Once a step each rank says whether it has work, what it acknowledges, and whether it wants to leave; rank 0 adds its
turn. One `all_gather` on the control link, a second one when the turn says something, a third while counts are being
gathered: the same number on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from orchestrator.balance.eplb.messages import Acknowledge, Turn
from orchestrator.balance.eplb.metric import STEPS
from orchestrator.balance.eplb.planner import grouped
from orchestrator.balance.eplb.settings import EplbSettings
from orchestrator.cluster.counts import StepCounts
from orchestrator.cluster.leader import Leader
from orchestrator.cluster.mover import Mover
from orchestrator.cluster.wire import as_rows, decode, encode, from_rows, is_empty
from orchestrator.model.expert_parallel import HeldExperts

if TYPE_CHECKING:
    from ep_comm import Communicator

MOST = 65536  # values that one gathering carries
_WORK, _LEAVES, _VERSION, _LAYER, _TURN = range(5)


class Agreement:
    """`orchestrator.engine.lockstep.Group` of one rank. Its `leader` is None but on rank 0.

    Attributes:
        leaving: set by the owner when this rank would go; `over` once all would.
        complete: whether every expert has a copy; no step runs before.
        number: agreements so far, by which turns are counted; `ran` steps took place.
        loads: float32 [steps, layers, experts], routed tokens of all ranks as they were gathered last, or None.
    """

    def __init__(
        self,
        link: Communicator,
        held: HeldExperts,
        counts: StepCounts,
        mover: Mover,
        settings: EplbSettings,
        leader: Leader | None = None,
    ) -> None:
        self.link, self.held, self.counts, self.mover = link, held, counts, mover
        self.settings, self.leader = settings, leader
        self.leaving = self.over = False
        self.number, self.ran = 0, 0
        self.loads: np.ndarray | None = None
        self._runs = False
        self._outbox: list[tuple[str, tuple[int, ...], torch.Tensor]] = []
        self._gathered: list[np.ndarray] = []
        self.complete = self._is_complete()

    def any(self, mine: bool) -> bool:
        """Called by all ranks once a step, when the step before has ended: whether the next one takes place."""
        if self._runs:
            self._end_step()
        self.number += 1
        self.mover.completed(self.number - 1)
        self.mover.poll()
        turn = None if self.leader is None else self.leader.turn(self.number)
        body = b"" if turn is None or is_empty(turn) else encode(turn)
        acknowledged = self.mover.acknowledgement() or Acknowledge(0, 0, self.held.rank)
        mine_row = [mine, self.leaving, acknowledged.version, acknowledged.layer, len(body)]
        rows = self.link.all_gather(torch.tensor([int(v) for v in mine_row], dtype=torch.int64))
        self._take(rows.numpy())
        if length := int(rows[0, _TURN]):
            self._begin(self._turn(body, length))
        if self._outbox:
            self._gather()
        self._runs = self.complete and bool(rows[:, _WORK].any())
        self.over = bool(rows[:, _LEAVES].all())
        return self._runs

    def _end_step(self) -> None:
        self.counts.end_step()
        self.ran += 1
        due = self.settings.due(self.ran)
        if self._outbox or not (due or self.ran % STEPS == 0):
            return
        self._post("received", self.counts.last_received())
        if due:
            self._post("routed", grouped(self.counts.window.counts(), self.settings.most_steps).astype(np.int64))

    def _post(self, what: str, values: np.ndarray) -> None:
        """Have values of the same shape on all ranks gathered, a bounded part an agreement."""
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
        parts = list(flat.split(MOST)) or [torch.zeros(1, dtype=torch.int64)]
        self._outbox += [("", (), part) for part in parts[:-1]] + [(what, values.shape, parts[-1])]

    def _gather(self) -> None:
        what, shape, part = self._outbox.pop(0)
        rows = self.link.all_gather(part.contiguous())
        self._gathered.append(rows.numpy())
        if not what:
            return
        whole = np.concatenate(self._gathered, axis=1)[:, : int(np.prod(shape))].reshape(-1, *shape)
        self._gathered = []
        if what == "routed":
            self.loads = whole.sum(0).astype(np.float32)
        if self.leader is not None and what == "routed":
            assert self.loads is not None
            self.leader.routed(self.loads)
        elif self.leader is not None:
            self.leader.received(whole)

    def _take(self, rows: np.ndarray) -> None:
        if self.leader is not None:
            said = [Acknowledge(int(r[_VERSION]), int(r[_LAYER]), i) for i, r in enumerate(rows) if r[_VERSION]]
            self.leader.acknowledge(said, self.number)

    def _turn(self, body: bytes, length: int) -> Turn:
        room = torch.zeros(-(-length // 8), dtype=torch.int64)
        if body:
            room = as_rows(body)
        parts = [self.link.all_gather(part.contiguous())[0] for part in room.split(MOST)]
        return decode(from_rows(torch.cat(parts), length), Turn)

    def _begin(self, turn: Turn) -> None:
        self.held.begin(turn)
        self.mover.begin(turn)
        if turn.held is not None or (turn.flips and not self.complete):
            self.complete = self._is_complete()

    def _is_complete(self) -> bool:
        slots = self.held.slots
        return all(bool((slots.routing(layer).counts > 0).all()) for layer in range(slots.table.shape[0]))
