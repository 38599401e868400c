"""One rank's port over its engine, whose steps belong to the group."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.engine.request import Event
from orchestrator.engine.sequence import State
from orchestrator.roles.engine_port import DecodeOutput, RunDecode
from orchestrator.service.ports.streaming import StreamingPort


class RankPort(StreamingPort):
    """Carries out commands between steps; what steps bring is noted, and told when it is asked for.

    The engine does not wait for the next `RunDecode`: requests may be ahead of what was told of them.
    """

    def note(self, events: Iterable[Event]) -> None:
        """Take note of what a step brought."""
        self._note(events)

    def is_stepping(self, run: RunDecode) -> bool:
        """Whether the engine computes something for any of these requests."""
        names = [self._names[key] for key in run.requests if key in self._names]
        found = [self.engine.find(name) for name in names]
        return any(s is not None and s.state is not State.LEAVING for s in found)

    def outputs(self, run: RunDecode) -> list[DecodeOutput]:
        """What came out for these requests and was not told."""
        return self._outputs_of(run)

    def has_outputs(self, run: RunDecode) -> bool:
        """Whether something came out for any of these requests that was not told."""
        return any(self._names.get(key) in self._tokens or self._names.get(key) in self._ends for key in run.requests)
