"""What is known of one overlapped step, from its plan to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import dspark_kernels
from orchestrator.engine.launch import Span
from orchestrator.engine.sampler import Verdict
from orchestrator.engine.sequence import Sequence
from orchestrator.engine.speculator import Batch
from orchestrator.engine.step_inputs import Inputs
from orchestrator.model.drafter import Proposed

IN_FLIGHT = 2  # steps that the host has started and not read, at most


@dataclass(eq=False)
class Flight:
    """One step between its plan and its end. What the device makes of it is filled in when the device gets there."""

    number: int
    sequences: list[Sequence]
    limits: list[int]
    total: int
    host: Inputs | None = None
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    last: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    drafts_of: Flight | Batch | None = None  # what it verifies
    drafting: bool = True  # whether it ends with new drafts
    forward: Span | None = None
    sample: Span | None = None
    place: int = 0
    logits: torch.Tensor | None = None
    schedule: dspark_kernels.Schedule | None = None
    verdict: Verdict | None = None
    proposed: Proposed | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    appended: bool = False  # its tokens are in the slot table
    weights: int = 0  # version of the weights it was started with

    def finished(self) -> None:
        """Wait for what was started of it. Raises what that raised."""
        for span in (self.forward, self.sample):
            if span is not None:
                span.wait()

    def ended_well(self) -> bool:
        """Wait for what was started of it; whether that was all of it, and none of it raised."""
        good = self.forward is not None and self.sample is not None
        for span in (self.forward, self.sample):
            try:
                if span is not None:
                    span.wait()
            except Exception:  # whoever settles has it already
                good = False
        return good

    @property
    def seconds(self) -> float:
        """How long the device was busy with it, once it has ended."""
        assert self.forward is not None and self.sample is not None
        return self.forward.seconds + self.sample.seconds

    @property
    def rows(self) -> dict[Sequence, int]:
        """Each request's row."""
        return {s: row for row, s in enumerate(self.sequences)}
