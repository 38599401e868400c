"""One request's life in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestrator.engine.image_spans import ImageSpan
from orchestrator.engine.request import SamplingParams


class State(Enum):
    """Who holds what: a waiting request holds nothing, a running one a slot and blocks, a parked one host copies.

    A leaving one computes nothing more and holds what it held, until it has gone to another engine or goes on here.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclass(eq=False)  # keyed by identity: two requests may be equal in every field
class Sequence:
    """`tokens` is prompt and output; the first `computed` of them have their cache rows.

    `order` is the arrival rank and the priority. `decoder_lower` is the first position that decoder layers compute.
    `drafts` are proposed to follow `tokens`, each with its `confidence`; `stale` are the confidences of the drafts
    before them. The next step verifies the first `planned`.
    `hit` tokens were taken from the prefix cache; no global row below `global_floor` is written, and `encoder_lower`
    bounds the windows of a replay. Blocks up to `publishable` get keys of `chain`, the first `published` have theirs;
    `stored` were handed on to the tiers behind the pool, snapshots at boundaries `unshared` were not yet. `fetch`
    brings blocks from `fetch_first` on from there; the request waits for it. `window` is a snapshot to be restored,
    `snapped` the last boundary that was kept. No chunk goes across one of `stops`.
    Once there are `leaves_at` tokens of output the request leaves (`engine.handoff`); with 0 it does as soon as the
    global rows of its prompt are there, and the decoder layers compute none of them.
    `seed` is the request's own or one drawn at admission. `announced` tells that `Ready` was sent. `matcher` and
    `text` belong to the output side. `images` are the prompt's, in order.
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
    drafts: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    stale: list[float] | None = None
    planned: int = 0
    aborted: bool = False
    leaves_at: int | None = None
    hit: int = 0
    global_floor: int = 0
    encoder_lower: int = 0
    shares: bool = False
    chain: Any = None
    published: int = 0
    publishable: int = 1 << 62
    window: bytes | None = None
    fetch: Any = None
    fetch_first: int = 0
    stored: int = 0
    unshared: list[int] = field(default_factory=list)
    snapped: int = 0
    stops: list[int] = field(default_factory=list)
    matcher: Any = None
    text: Any = None
    recorder: Any = None
    prompt_logprobs: list[float | None] = field(default_factory=list)
    images: tuple[ImageSpan, ...] = ()

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def repeatable(self) -> bool:
        """Whether tokens are drawn by position alone, so that no draft and no neighbour can change them."""
        return self.params.seed is not None

    @property
    def leaves(self) -> bool:
        """Whether it is time to leave."""
        if self.leaves_at is None:
            return False
        return self.remaining == 0 if self.leaves_at == 0 else self.output_len >= self.leaves_at

    @property
    def held(self) -> int:
        """First tokens whose blocks hold rows: more than `computed` while a replay is under way."""
        return max(self.computed, self.global_floor)

    @property
    def stretch(self) -> int:
        """Tokens that the next step may compute at most."""
        return min((stop for stop in self.stops if stop > self.computed), default=len(self.tokens)) - self.computed

    @property
    def ends_in_image(self) -> bool:
        """Whether the last token is inside an image, so that no id says what it is."""
        return bool(self.images) and self.images[-1].end >= len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens without cache rows: more than one while the prompt is being read, one when decoding."""
        return len(self.tokens) - self.computed
