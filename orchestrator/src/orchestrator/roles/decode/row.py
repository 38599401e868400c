"""One request at a decode worker, and what the worker is set to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kernel_core.check import require
from orchestrator.roles.messages import Key, Reserve
from orchestrator.roles.outgoing import Outgoing
from orchestrator.roles.state_parts import Manifest

State = Literal["reserved", "pulling", "loading", "landed", "decoding", "moving", "telling"]
IN_ENGINE = ("loading", "landed", "decoding", "moving")


@dataclass(frozen=True)
class DecodeOptions:
    """Attributes:
    tokens: of cache. rows: requests at once, 0 for no limit. layout: tag of the states that it takes.
    ranks: that step together.
    """

    tokens: int
    rows: int = 0
    layout: str = ""
    ranks: int = 1

    def __post_init__(self) -> None:
        require(self.tokens > 0, "tokens", self.tokens, "1 or more")
        require(self.rows >= 0, "rows", self.rows, "0 or more")
        require(self.ranks > 0, "ranks", self.ranks, "1 or more")


@dataclass
class Row:
    """Attributes:
    order: as the router gave it. epoch: the present one, above that of `order` after a migration.
    output: all tokens known. acked: of them that the entry has. reason: why it ended, in state telling.
    notes: by index, beside the tokens that are not acknowledged, see `Tokens`.
    heard: last word of the source. sent, tries: of what is asked of it. got: parts that came.
    since: when the engine was asked for what it has not answered, in state loading and at the start of moving.
    acked_at: last word of the entry. told_at: last word to it. waits_since: when the oldest output that is not
        acknowledged was told last.
    move: number of its attempt to find another place. outgoing: the state that is on its way there.
    expected: the engine fetches its state ahead.
    """

    order: Reserve
    heard: float
    epoch: int
    state: State = "reserved"
    output: list[int] = field(default_factory=list)
    manifest: Manifest | None = None
    got: dict[int, bytes] = field(default_factory=dict)
    since: float = 0.0
    sent: float = 0.0
    tries: int = 0
    notes: dict[int, bytes] = field(default_factory=dict)
    acked: int = 0
    acked_at: float = 0.0
    told_at: float = 0.0
    waits_since: float = 0.0
    reason: str = ""
    cached: int = 0
    move: int = 0
    target: tuple[str, int] | None = None
    outgoing: Outgoing | None = None
    expected: bool = False

    @property
    def in_engine(self) -> bool:
        """Whether the engine holds something of it."""
        return self.state in IN_ENGINE or (self.expected and self.state in ("reserved", "pulling"))

    @property
    def key(self) -> Key:
        return self.order.request, self.epoch

    @property
    def tokens(self) -> int:
        """Of cache that it takes: what was reserved, or more if it has outgrown that; nothing once it has ended."""
        if self.state == "telling":
            return 0
        return max(self.order.need, len(self.order.spec.prompt) + len(self.output) + 1)

    def note(self, notes: tuple[bytes, ...]) -> None:
        """Keep what is to be told of the last tokens."""
        first = len(self.output) - len(notes)
        for number, note in enumerate(notes):
            self.notes[first + number] = note

    def notes_from(self, first: int) -> tuple[bytes, ...]:
        """What is to be told of all tokens from `first` on; nothing if there is nothing."""
        return tuple(self.notes.get(n, b"") for n in range(first, len(self.output))) if self.notes else ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of the parts that have not come."""
        return () if self.manifest is None else tuple(n for n in range(len(self.manifest.parts)) if n not in self.got)
