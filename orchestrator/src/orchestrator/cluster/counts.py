"""What each step of one rank routed and received, by layer, with prompts and decoding apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from orchestrator.balance.eplb.metric import STEPS
from orchestrator.balance.eplb.window import LoadWindow

Statistics = Literal["all", "prefill", "decode"]
"""Whose rows: of every request, of those that read a prompt, of those that decode."""
KINDS: tuple[Statistics, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class StepCount:
    """Of one step of this rank: routed int64 [2, layers, experts] by kind, received int64 [layers]."""

    routed: np.ndarray
    received: np.ndarray

    @property
    def kinds(self) -> int:
        """Bit 0: some row read a prompt; bit 1: some row decoded."""
        return sum(1 << kind for kind in range(len(KINDS)) if self.routed[kind].any())


class Counted(Protocol):
    """A `StepCount`, or what becomes one when it is asked for."""

    @property
    def routed(self) -> np.ndarray: ...

    @property
    def received(self) -> np.ndarray: ...

    @property
    def kinds(self) -> int: ...


class Ring:
    """The last `length` of what was added, each an array of `shape`."""

    def __init__(self, length: int, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self._values, self.added = np.zeros((length, *shape), dtype), 0

    def add(self, value: np.ndarray | int) -> None:
        self._values[self.added % len(self._values)] = value
        self.added += 1

    def last(self) -> np.ndarray:
        """[held, *shape], oldest first."""
        held = min(self.added, len(self._values))
        return self._values[(self.added - held + np.arange(held)) % len(self._values)]


class StepCounts:
    """Told by the layers (`ParallelExperts`) and of a pass's beginning and end (`orchestrator.engine.runner.Watch`).

    A step that has ended waits until the ranks agree on what it was: it counts as one of a kind if it had rows of that
    kind on any rank, so that the windows of all ranks hold the same steps. Layers may note it on a thread of the device
    while the host files an earlier one.

    Attributes:
        statistics: whose rows `window` holds. steps: by kind, that were filed; "all" is all of them.
        window: float32 [layers, experts] a step, routed tokens by logical expert without padding.
    """

    def __init__(self, layers: int, num_experts: int, top_k: int, window: int, statistics: Statistics = "all") -> None:
        self.statistics, self._layers, self._top_k = statistics, layers, top_k
        self.window = Ring(window, (layers, num_experts), np.float32)
        self.steps: dict[Statistics, int] = {"all": 0, "prefill": 0, "decode": 0}
        self._open = LoadWindow(len(KINDS) * layers, num_experts, 1)  # checks what it is told
        self._rows = np.zeros(len(KINDS) * layers, np.int64)
        self._here = np.zeros(layers, np.int64)
        self._prompts = np.zeros(0, np.bool_)
        self._ended = 0
        self._waiting: deque[Counted] = deque()
        self._received = Ring(STEPS, (layers,), np.int64)
        self._kinds = Ring(STEPS, (), np.int64)

    def began(self, prompts: Sequence[bool]) -> None:
        self._prompts = np.asarray(prompts, np.bool_)

    def routed(self, layer: int, ids: np.ndarray, valid: np.ndarray, owner: np.ndarray | None = None) -> None:
        """Logical experts [T, top_k] of this rank's rows; `owner` [T] is each one's request in the step.

        Without owners rows count as those of decoding, unless every request of the step reads a prompt.
        """
        if owner is None or not len(self._prompts):
            reads = np.full(len(ids), len(self._prompts) > 0 and bool(self._prompts.all()))
        else:
            reads = np.append(self._prompts, False)[np.minimum(owner, len(self._prompts))]
        for kind, mine in enumerate((valid & reads, valid & ~reads)):
            self._rows[kind * self._layers + layer] = mine.sum()
            self._open.note(kind * self._layers + layer, ids, mine)

    def received(self, layer: int, rows: int) -> None:
        self._here[layer] = rows

    def ended(self) -> None:
        """Close a step. Each layer's counts have to sum to its rows x top_k, else ValueError."""
        self._open.end_step(self._ended, self._rows, self._top_k)
        routed = self._open.counts()[-1].reshape(len(KINDS), self._layers, -1)
        self._waiting.append(StepCount(routed, self._here.copy()))
        self._rows[:], self._here[:] = 0, 0
        self._ended += 1

    def oldest(self) -> Counted:
        """The step that is filed next; it has ended."""
        return self._waiting[0]

    def file(self, kinds: int) -> None:
        """Put the oldest step that waits into the windows; `kinds` as `StepCount.kinds`, of all ranks together."""
        step = self._waiting.popleft()
        self._received.add(step.received)
        self._kinds.add(kinds)
        self.steps["all"] += 1
        for at, kind in enumerate(KINDS):
            if kinds >> at & 1:
                self.steps[kind] += 1
                if self.statistics == kind:
                    self.window.add(step.routed[at])
        if self.statistics == "all":
            self.window.add(step.routed.sum(0))

    def last_received(self) -> np.ndarray:
        """int64 [steps, layers], (token, slot) pairs of the last 128 filed steps, oldest first."""
        return self._received.last()

    def last_kinds(self) -> np.ndarray:
        """int64 [steps], `kinds` of the same steps."""
        return self._kinds.last()
