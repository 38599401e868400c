"""One request's life in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestrator.engine.request import SamplingParams


class State(Enum):
    """Who holds what: a waiting request holds nothing, a running one a slot and blocks, a parked one host copies."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(eq=False)  # keyed by identity: two requests may be equal in every field
class Sequence:
    """`tokens` is prompt and output; the first `computed` of them have their cache rows.

    `order` is the arrival rank and the priority. `decoder_lower` is the first position that decoder layers compute.
    `seed` is the request's own or one drawn at admission. `announced` tells that `Ready` was sent. `matcher` and
    `text` belong to the output side.
    """

    request_id: str
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    max_total: int
    order: int
    seed: int
    decoder_lower: int = 0
    computed: int = 0
    announced: bool = False
    state: State = State.WAITING
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    parked: Any = None
    preemptions: int = 0
    matcher: Any = None
    text: Any = None
    recorder: Any = None
    prompt_logprobs: list[float | None] = field(default_factory=list)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens without cache rows: more than one while the prompt is being read, one when decoding."""
        return len(self.tokens) - self.computed
