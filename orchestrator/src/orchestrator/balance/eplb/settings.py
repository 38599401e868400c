"""When experts are planned anew, on what, and how much may move."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_core.check import require
from orchestrator.balance.eplb.swaps import MoveLimits


@dataclass(frozen=True)
class EplbSettings:
    """Settings of one engine.

    Attributes:
        redundant: slots a rank beyond those that hold every expert once.
        window: steps whose counts a plan is made from.
        interval: steps between two plans; 0 makes none. The first comes after a quarter of it.
        least_tokens: mean counts a layer and step below which a window says too little.
        least_gain: relative gain of the sum of the steps' peaks below which nothing moves.
        floor: load that every expert has at least, as a part of the mean expert's.
        most_steps: steps that a plan looks at; longer windows are summed to as many.
        refine: exchanges a layer that improve a full plan before it is carried out.
        limits: what an incremental plan may move.
        incremental: never plan in full, though all ranks share fast links.
    """

    redundant: int
    window: int
    interval: int
    least_tokens: float = 64.0
    least_gain: float = 0.02
    floor: float = 0.01
    most_steps: int = 128
    refine: int = 64
    limits: MoveLimits = field(default_factory=MoveLimits)
    incremental: bool = False

    def __post_init__(self) -> None:
        require(self.redundant >= 0, "redundant", self.redundant, "0 or more")
        require(self.window > 0, "window", self.window, "1 or more")
        require(
            self.interval == 0 or self.interval >= self.window,
            "interval",
            self.interval,
            f"0, or {self.window} or more",
        )
        require(self.least_tokens >= 0, "least_tokens", self.least_tokens, "0 or more")
        require(0 <= self.least_gain < 1, "least_gain", self.least_gain, "0 to below 1")
        require(0 < self.floor <= 1, "floor", self.floor, "above 0, to 1")
        require(self.most_steps > 0, "most_steps", self.most_steps, "1 or more")
        require(self.refine >= 0, "refine", self.refine, "0 or more")

    def due(self, step: int) -> bool:
        """Whether a plan is to be made after `step` steps."""
        if self.interval == 0 or step <= 0:
            return False
        return step == max(1, self.interval // 4) or step % self.interval == 0


PREFILL = EplbSettings(redundant=4, window=100, interval=1000)
DECODE = EplbSettings(redundant=1, window=1000, interval=10_000)
