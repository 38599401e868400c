"""The step agreement of an expert-parallel group, and with it all that has to happen between the same two steps.

Once a step each rank says whether it has work, what it acknowledges, whether it wants to leave, and what its last step
was; rank 0 adds its turn. One `all_gather` on the control link, a second one when the turn says something, a third
while counts are being gathered: the same number on all ranks.

Where steps overlap, an agreement is made while the step that was agreed on before is still running. All that asks for a
step's end then looks one step further back (`lag`), on all ranks alike.
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
_WORK, _LEAVES, _KINDS, _VERSION, _LAYER, _TURN = range(6)


class Agreement:
    """`orchestrator.engine.lockstep.Group` of one rank. Its `leader` is None but on rank 0.

    Attributes:
        leaving: set by the owner when this rank would go; `over` once all would.
        complete: whether every expert has a copy; no step runs before.
        number: agreements so far, by which turns are counted; `ran` steps were agreed on, `filed` of them have ended
            and are counted.
        loads: float32 [steps, layers, experts], routed tokens of all ranks as they were gathered last, or None.
        lag: steps that may be running when the next one is agreed on: 1 where they overlap, else 0.
    """

    def __init__(
        self,
        link: Communicator,
        held: HeldExperts,
        counts: StepCounts,
        mover: Mover,
        settings: EplbSettings,
        leader: Leader | None = None,
        lag: int = 0,
    ) -> None:
        self.link, self.held, self.counts, self.mover = link, held, counts, mover
        self.settings, self.leader, self.lag = settings, leader, lag
        self.leaving = self.over = False
        self.number = self.ran = self.filed = 0
        self.loads: np.ndarray | None = None
        self._runs = False
        self._outbox: list[tuple[str, tuple[int, ...], torch.Tensor]] = []
        self._gathered: list[np.ndarray] = []
        self._kinds = np.zeros(0, np.int64)  # of the steps whose `received` is being gathered
        self.complete = self._is_complete()

    def any(self, mine: bool) -> bool:
        """Called by all ranks once a step: whether the next one takes place. The step `lag` before has ended."""
        running = self.lag if self._runs else 0
        self.number += 1
        self.mover.completed(self.number - 1 - running)
        self.mover.poll()
        ended = self.filed < self.ran - running
        kinds = self.counts.oldest().kinds if ended else 0
        turn = None if self.leader is None else self.leader.turn(self.number)
        body = b"" if turn is None or is_empty(turn) else encode(turn)
        acknowledged = self.mover.acknowledgement() or Acknowledge(0, 0, self.held.rank)
        mine_row = [mine, self.leaving, kinds, acknowledged.version, acknowledged.layer, len(body)]
        rows = self.link.all_gather(torch.tensor([int(v) for v in mine_row], dtype=torch.int64))
        self._take(rows.numpy())
        if length := int(rows[0, _TURN]):
            self._begin(self._turn(body, length))
        if ended:
            self._file(int(np.bitwise_or.reduce(rows[:, _KINDS].numpy())))
        if self._outbox:
            self._gather()
        self._runs = self.complete and bool(rows[:, _WORK].any())
        self.ran += self._runs
        self.over = bool(rows[:, _LEAVES].all())
        return self._runs

    def _file(self, kinds: int) -> None:
        """Count a step that has ended, and have counts gathered where it is time."""
        planned_on = self.counts.steps[self.counts.statistics]
        self.counts.file(kinds)
        self.filed += 1
        steps = self.counts.steps[self.counts.statistics]
        due = steps > planned_on and self.settings.due(steps)
        if self._outbox or not (due or self.filed % STEPS == 0):
            return
        self._post("received", self.counts.last_received())
        self._kinds = self.counts.last_kinds()
        if due:
            self._post("routed", grouped(self.counts.window.last(), self.settings.most_steps).astype(np.int64))

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
            self.leader.received(whole, self._kinds)

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
