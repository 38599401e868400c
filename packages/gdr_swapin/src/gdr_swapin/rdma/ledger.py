"""Which layers have arrived, from completions in any order: a state machine without clocks or memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gdr_swapin.plan import Copies
from gdr_swapin.rdma.queue_pair import Completion, Status, WorkRequest


class LayerLedger:
    """The requests of one transfer. A layer has arrived when each of its requests has completed once, whole.

    A completion counts once. A short one, an error, or one for a request that was never posted fails its layer and all
    later ones; requests that were posted stay outstanding until they complete or the queue is reset, since the card may
    still write their targets.
    """

    def __init__(self, layers: Sequence[Copies], first_id: int) -> None:
        self._waiting: deque[tuple[int, WorkRequest]] = deque()
        self._left = [len(copies) for copies in layers]
        self._outstanding: dict[int, tuple[int, WorkRequest]] = {}
        self._completed: set[int] = set()
        self.arrived = 0  # layers, in order
        self.failure: tuple[int, str] | None = None  # position, reason
        self.duplicates = 0
        number = first_id
        for position, copies in enumerate(layers):
            for to, source, size in zip(copies.targets, copies.sources, copies.sizes, strict=True):
                self._waiting.append((position, WorkRequest(number, int(to), int(source), int(size))))
                number += 1
        self.end_id = number
        self._advance()

    @property
    def outstanding(self) -> int:
        """Posted and not completed."""
        return len(self._outstanding)

    @property
    def settled(self) -> bool:
        """Every layer has arrived, or one has failed; nothing more will be posted."""
        return self.failure is not None or self.arrived == len(self._left)

    def to_post(self, room: int) -> list[WorkRequest]:
        """The next requests in deadline order, at most `room`; they count as posted."""
        batch: list[WorkRequest] = []
        while self._waiting and len(batch) < room and self.failure is None:
            position, request = self._waiting.popleft()
            self._outstanding[request.id] = (position, request)
            batch.append(request)
        return batch

    def not_posted(self, batch: Sequence[WorkRequest], reason: str) -> None:
        """The card refused a batch as a whole."""
        position = min(self._outstanding.pop(request.id)[0] for request in batch)
        self.fail(position, reason)

    def complete(self, completion: Completion) -> None:
        """Take one completion."""
        if completion.id in self._completed:
            self.duplicates += 1
            return
        known = self._outstanding.pop(completion.id, None)
        if known is None:
            self.fail(self.arrived, f"a completion of request {completion.id}, which was not posted")
            return
        self._completed.add(completion.id)
        position, request = known
        if completion.status is not Status.SUCCESS:
            self.fail(position, f"request {request.id} ended with {completion.status.value}")
        elif completion.bytes != request.bytes:
            self.fail(position, f"request {request.id} moved {completion.bytes} of {request.bytes} bytes")
        else:
            self._left[position] -= 1
            self._advance()

    def fail(self, position: int, reason: str) -> None:
        """The layer, if it has not arrived, and all later ones; the earliest failing layer counts."""
        position = max(position, self.arrived)
        if position < len(self._left) and (self.failure is None or position < self.failure[0]):
            self.failure = (position, reason)
        self._waiting.clear()

    def abandon(self) -> None:
        """The queue was reset: nothing is outstanding."""
        self._outstanding.clear()

    def _advance(self) -> None:
        limit = len(self._left) if self.failure is None else self.failure[0]
        while self.arrived < limit and self._left[self.arrived] == 0:
            self.arrived += 1
