"""What training does when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A stretch of training, up to the share `until` of all steps (1.0 for the last).

    `length` tokens a sequence and `batch` sequences a step. `sparse`: top-k and candidate restriction as in
    inference, else every visible row is read. `quantised`: caches and weights pass through their stored formats.
    `replay`: decoder windows begin anew at random positions, as after a prefill with a bounded decoder tail.
    """

    until: float
    length: int
    batch: int
    sparse: bool = True
    quantised: bool = True
    replay: bool = False


BACKBONE: dict[str, tuple[Phase, ...]] = {
    "v41-mini": (
        Phase(0.08, 2048, 32, sparse=False, quantised=False),
        Phase(0.68, 2048, 32),
        Phase(0.88, 2048, 32, replay=True),
        Phase(1.00, 8192, 8, replay=True),
    ),
    "v41-nano": (
        Phase(0.2, 256, 4, sparse=False, quantised=False),
        Phase(0.6, 256, 4),
        Phase(1.0, 256, 4, replay=True),
    ),
}
DRAFTER: dict[str, tuple[Phase, ...]] = {
    "v41-mini": (Phase(1.0, 2048, 32, replay=True),),
    "v41-nano": (Phase(1.0, 256, 4, replay=True),),
}
