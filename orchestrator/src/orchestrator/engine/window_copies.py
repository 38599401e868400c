"""Window rings as a step in flight leaves them, copied before the step behind it writes there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orchestrator.engine.flight import Flight
from orchestrator.engine.launch import Launcher, Span
from orchestrator.engine.sequence import Sequence
from orchestrator.model.config import BLOCK_TOKENS


@dataclass(frozen=True)
class _Copy:
    rows: torch.Tensor
    span: Span


class WindowCopies:
    """One copy at most for each running request, of a step in which it may pass a block boundary.

    Args:
        rings: [layers, slots, ring_rows, row], the rings that a snapshot holds.
        launcher: where device work goes in order: a copy stands between two steps.
    """

    def __init__(self, rings: torch.Tensor, launcher: Launcher) -> None:
        self._rings, self._launcher = rings, launcher
        self._copies: dict[Sequence, _Copy] = {}

    def start(self, flight: Flight) -> None:
        """Launch the copies that `flight`, started last, may need. To be called before the next step is launched."""
        self._copies.clear()  # of requests that were aborted before their step was read
        for sequence, limit in zip(flight.sequences, flight.limits, strict=True):
            least = len(sequence.tokens)  # rows that the request has after the step, with no draft accepted
            if sequence.shares and (least + limit) // BLOCK_TOKENS > (least - 1) // BLOCK_TOKENS:
                self._copies[sequence] = self._launch(sequence.slot)

    def _launch(self, slot: int) -> _Copy:
        source = self._rings[:, slot]
        rows = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        return _Copy(rows, self._launcher.launch(lambda: _copy(rows, source), "windows"))

    def take(self, sequence: Sequence) -> torch.Tensor | None:
        """The rows after the step that was just read, [layers, ring_rows, row] in host memory; None: not copied."""
        copy = self._copies.pop(sequence, None)
        if copy is None:
            return None
        copy.span.wait()
        return copy.rows


def _copy(rows: torch.Tensor, source: torch.Tensor) -> None:
    rows.copy_(source, non_blocking=True)
