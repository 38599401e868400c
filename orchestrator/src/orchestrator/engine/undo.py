"""Takes back what a step that ended in an error has done to window rings and compressor tails.

A step writes the rows of its own tokens. Global rows are written again, to the same places and with the same bytes,
when the tokens are computed again. Rings are as long as the window and `backtracking` rows: the rows of one decode
step with its drafts overwrite nothing that the position before them sees. A longer stretch of a prompt does, so rings
and tails of its request are copied before it is computed.
"""

from __future__ import annotations

from orchestrator.engine.sequence import Sequence, State
from orchestrator.model.cache import CachePools, SlotState


class Undo:
    """Of the step that is being computed alone; overlapped steps are decode steps, which need none.

    Attributes:
        taken_back: requests whose rings were put back so far.
    """

    def __init__(self, cache: CachePools) -> None:
        self.cache, self.taken_back = cache, 0
        self._most = cache.config.backtracking
        self._kept: list[tuple[Sequence, int, SlotState]] = []

    def keep(self, work: list[tuple[Sequence, int]]) -> None:
        """Copy what the step would overwrite for good. A prompt at its beginning has nothing to lose."""
        self._kept = [
            (sequence, sequence.slot, self.cache.copy_slot(sequence.slot))
            for sequence, tokens in work
            if tokens > self._most and sequence.computed > 0
        ]

    def forget(self) -> None:
        """The step has ended well."""
        self._kept = []

    def back(self) -> None:
        """The step has ended in an error, and nothing runs any more."""
        for sequence, slot, state in self._kept:
            if sequence.state is State.RUNNING and sequence.slot == slot:
                self.cache.load_slot(slot, state)
                self.taken_back += 1
        self._kept = []
