"""The workers as the router sees them: who is alive, who has room, who is next."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.balance.decode import DecodeEngine, Incoming, choose_group, place
from orchestrator.balance.paths import PrefillLoad
from orchestrator.roles.messages import Report, Role, RoleLoad
from orchestrator.roles.router.records import Place, View


class Fleet:
    """Attributes:
    views: live workers by name.
    """

    def __init__(self) -> None:
        self.views: dict[str, View] = {}

    def of(self, role: Role) -> list[View]:
        return [v for v in self.views.values() if v.report.role == role]

    def at(self, where: Place | None) -> View | None:
        """The view of that life of a worker, if it still lives."""
        view = None if where is None else self.views.get(where[0])
        return view if view is not None and where is not None and view.report.incarnation == where[1] else None

    def add(self, report: Report, now: float) -> View:
        view = self.views[report.worker] = View(report, now)
        view.take(report, now)
        return view

    def silent(self, now: float, lease: float) -> list[View]:
        return [v for v in self.views.values() if now - v.seen > lease]

    # Prefill

    def prefill_loads(self) -> dict[str, PrefillLoad]:
        """Active prefill workers that pull: those with room."""
        return {
            name: v.as_prefill()
            for name, v in self.views.items()
            if v.report.role == "prefill" and v.active and v.room > 0
        }

    def reading(self) -> dict[str, int]:
        """Tokens that wait at each node's network card."""
        return {v.report.node: v.report.reading for v in self.views.values()}

    # Decode

    def decode_engines(self, without: Iterable[str] = ()) -> list[DecodeEngine]:
        """Active decode workers; what was given counts as held."""
        hidden = set(without)
        return [
            v.as_decode()
            for name, v in self.views.items()
            if v.report.role == "decode" and v.active and name not in hidden
        ]

    def largest_decode(self) -> int:
        """Tokens of cache of the largest active decode worker when it holds nothing."""
        return int(max((v.report.capacity for v in self.of("decode") if v.active), default=0))

    def choose_decode(self, engines: list[DecodeEngine], incoming: Incoming) -> View | None:
        """Two-dimensional placement: the group with fewest tokens, in it by count and tokens. Counters follow."""
        groups: dict[str, list[DecodeEngine]] = {}
        for engine in engines:
            groups.setdefault(engine.group, []).append(engine)
        group = choose_group(groups, incoming)
        if group is None:
            return None
        placed = place(groups[group], [incoming])
        if not placed:
            return None
        view = self.views[placed[0][1].name]
        view.changed()  # the engine that was seen counts the request, which the view may never get
        return view

    # Scaling

    def load(self, role: Role, arrived: int, backlog: int, waiting: int = 0) -> RoleLoad:
        """Of one role. `waiting`: requests that would be at its workers if they had room.

        What is used up is what counts, cache or rows: a worker with no row left takes nothing, however much cache it
        has.
        """
        views = self.of(role)
        active = [v for v in views if v.active]
        capacity = sum(v.report.capacity for v in active)
        use = 1.0 - sum(max(0.0, v.room) for v in active) / capacity if capacity > 0 else 1.0
        requests, rows = sum(v.requests + len(v.given) for v in active), sum(v.report.rows for v in active)
        if rows:
            use = max(use, requests / rows)
        return RoleLoad(
            role,
            tuple(v.report.worker for v in active),
            tuple(v.report.incarnation for v in active),
            tuple(v.report.worker for v in views if not v.active),
            min(1.0, max(0.0, use)),
            arrived,
            backlog,
            requests + waiting,
            sum(v.tokens + int(v.owed) for v in active) if role == "decode" else 0,
        )
