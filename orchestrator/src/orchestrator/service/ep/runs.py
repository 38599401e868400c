"""Steps that several ranks were asked for, until all have answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.roles.engine_port import DecodeDone, DecodeOutput, PrefillDone, RunDecode, RunPrefill


@dataclass
class _Run:
    began: float
    waits: set[int]
    failed: list[tuple[str, int, str]] = field(default_factory=list)
    ahead: list[tuple[str, int, int]] = field(default_factory=list)
    outputs: list[DecodeOutput] = field(default_factory=list)


class Runs:
    """Of one group: an answer of each rank makes one of the group."""

    def __init__(self) -> None:
        self._runs: dict[tuple[type, int], _Run] = {}

    def begin(self, run: RunPrefill | RunDecode, ranks: Iterable[int], now: float) -> PrefillDone | DecodeDone | None:
        """Wait for these ranks; the answer itself where there are none."""
        kind: type = PrefillDone if isinstance(run, RunPrefill) else DecodeDone
        self._runs[kind, run.step] = _Run(now, set(ranks))
        return self._ended(kind, run.step, now)

    def take(self, rank: int, answer: PrefillDone | DecodeDone, now: float) -> PrefillDone | DecodeDone | None:
        """Note a rank's answer; that of the group once all have come. None for one that nobody waits for."""
        run = self._runs.get((type(answer), answer.step))
        if run is None or rank not in run.waits:
            return None
        run.waits.discard(rank)
        if isinstance(answer, PrefillDone):
            run.failed += answer.failed
            run.ahead += answer.ahead
        else:
            run.outputs += answer.outputs
        return self._ended(type(answer), answer.step, now)

    def clear(self) -> None:
        self._runs.clear()

    def _ended(self, kind: type, step: int, now: float) -> PrefillDone | DecodeDone | None:
        run = self._runs[kind, step]
        if run.waits:
            return None
        del self._runs[kind, step]
        if kind is PrefillDone:
            return PrefillDone(step, now - run.began, failed=tuple(run.failed), ahead=tuple(run.ahead))
        return DecodeDone(step, tuple(run.outputs))
