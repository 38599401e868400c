"""What the router remembers of a request and of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orchestrator.balance.decode import DecodeEngine
from orchestrator.balance.paths import PrefillLoad
from orchestrator.roles.messages import AssignPrefill, Embedding, Key, Report, RequestSpec, Reserve

State = Literal["unclaimed", "encoding", "queued", "assigned", "decoding", "lost"]
Place = tuple[str, int]  # worker and incarnation


@dataclass
class Record:
    """One request. Times are of the router's clock.

    Attributes:
        spec: None where only a report told of it.
        wanted: last word of its entry. seen: last report that named it, or its assignment. sent: last assignment.
        prefill, decode: who works on it. target: who will, after a migration; its number is `move`.
        assignment, reservation: what was sent, to be repeated.
        embeddings: by digest of its images, None until ready. encoders: who was asked, by digest.
        why, certain: of a lost one, as in `Lost`.
    """

    request: str
    epoch: int
    entry: str
    spec: RequestSpec | None
    output: tuple[int, ...]
    state: State
    wanted: float
    seen: float = 0.0
    sent: float = 0.0
    queued: float = 0.0
    cost: float = 0.0
    bin: int = -1
    prefill: Place | None = None
    decode: Place | None = None
    target: Place | None = None
    move: int = 0
    assignment: AssignPrefill | None = None
    reservation: Reserve | None = None
    embeddings: dict[str, Embedding | None] = field(default_factory=dict)
    encoders: dict[str, str] = field(default_factory=dict)
    why: str = ""
    certain: bool = False

    @property
    def key(self) -> Key:
        return self.request, self.epoch

    @property
    def places(self) -> list[Place]:
        """All workers that may hold something of it."""
        return [place for place in (self.prefill, self.decode, self.target) if place is not None]


@dataclass
class View:
    """What a worker last reported, less what it was given since.

    Attributes:
        given: what was assigned and no report has named yet, in the unit of `Report.room`.
    """

    report: Report
    seen: float
    given: dict[Key, float] = field(default_factory=dict)
    owed: float = 0.0
    tokens: int = 0
    requests: int = 0
    _engine: DecodeEngine | None = None  # as policies see it, until something changes
    _load: PrefillLoad | None = None

    @property
    def place(self) -> Place:
        return self.report.worker, self.report.incarnation

    @property
    def active(self) -> bool:
        return self.report.life == "active"

    @property
    def room(self) -> float:
        return self.report.room - self.owed

    def as_decode(self) -> DecodeEngine:
        """What was given counts as held."""
        if self._engine is None:
            report = self.report
            held, tokens = self.requests + len(self.given), self.tokens + int(self.owed)
            self._engine = DecodeEngine(report.worker, held, tokens, int(self.room), report.group, report.rows)
        return self._engine

    def as_prefill(self) -> PrefillLoad:
        if self._load is None:
            self._load = PrefillLoad(self.report.worker, self.tokens, self.report.node)
        return self._load

    def changed(self) -> None:
        """What policies see is made anew when it is asked for."""
        self._engine = self._load = None

    def take(self, report: Report, now: float) -> None:
        """A newer report of the same life."""
        self.changed()
        self.report, self.seen = report, now
        self.tokens = sum(h.tokens for h in report.holding)
        self.requests = len(report.holding)
        if self.given:
            for holding in report.holding:
                self.forget((holding.request, holding.epoch))

    def give(self, key: Key, amount: float) -> None:
        self.changed()
        self.owed += amount - self.given.get(key, 0.0)
        self.given[key] = amount

    def forget(self, key: Key) -> None:
        """It holds it by its own word now, or will not get it."""
        self.changed()
        self.owed -= self.given.pop(key, 0.0)
        if not self.given:
            self.owed = 0.0  # no rest of rounding


@dataclass
class Tombstone:
    """A request that was released up to `epoch`; `ended` if no higher one will come. `at`: the router's age then."""

    epoch: int
    ended: bool
    at: float
