"""Hit rate of recorded traces against capacity, time to live and class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.cache.block_object import HEADER_BYTES
from orchestrator.cache.replay import Outcome, replay
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.traces import TraceRequest, agentic, mooncake

BLOCK_BYTES = 113_920 + HEADER_BYTES
AGENTIC = Path("agentic-claude-code-weka") / "sessions_compact_unique.jsonl.gz"
CHAT = Path("mooncake") / "conversation_trace.jsonl"
CAPACITIES_GB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TTLS_S = (300.0, 1800.0, 3600.0, 6 * 3600.0, 24 * 3600.0)
MIXED_GB = (4.0, 16.0, 64.0, 128.0)
DAY = 86_400.0


@dataclass(frozen=True)
class Point:
    """One replay. `capacity_gb` and `ttl_s` are None where there is no bound; rates are shares of prompt tokens."""

    trace: str
    capacity_gb: float | None
    ttl_s: float | None
    rate: float
    agent: float | None
    chat: float | None
    requests: int
    blocks: int
    removed: int
    stored_gb: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(folder: Path, say: Callable[[str], None], sessions_s: float = DAY, quick: bool = False) -> list[Point]:
    """All curves; with `quick` only the replay without bounds, and one of each kind."""
    agents = agentic(folder / AGENTIC, sessions_s)
    points: list[Point] = []

    def add(trace: str, requests: list[TraceRequest], capacity_gb: float | None, ttl_s: float | None) -> None:
        point = _point(trace, requests, capacity_gb, ttl_s)
        points.append(point)
        say(f"{trace}, {capacity_gb or 'no bound of'} GB, {ttl_s or 'no bound of'} s: {point.rate:.2%}")

    add("agentic", agents, None, None)
    for capacity in CAPACITIES_GB[2:3] if quick else CAPACITIES_GB:
        add("agentic", agents, capacity, None)
    for ttl in TTLS_S[:1] if quick else TTLS_S:
        add("agentic", agents, None, ttl)
    if not quick and (folder / CHAT).is_file():
        mixed = sorted(agents + mooncake(folder / CHAT, sessions_s / 2), key=lambda request: request.time)
        for bound in (*MIXED_GB, None):
            add("agentic and chat", mixed, bound, None)
    return points


def _point(trace: str, requests: list[TraceRequest], capacity_gb: float | None, ttl_s: float | None) -> Point:
    """Without a `ttl_s` the classes' own times hold: three days for agents, seven for chats."""
    lives = {} if ttl_s is None else {"ttl": dict.fromkeys(Retention, ttl_s)}
    policy = RetentionPolicy(grace_s=0.0, **lives)
    outcome: Outcome = replay(requests, BLOCK_BYTES, None if capacity_gb is None else int(capacity_gb * 1e9), policy)
    agent, chat = (outcome.rate(c) if outcome.tokens[c] else None for c in (Retention.AGENT, Retention.CHAT))
    stored = outcome.most_blocks * BLOCK_BYTES / 1e9
    return Point(trace, capacity_gb, ttl_s, outcome.rate(), agent, chat, outcome.requests, outcome.published,
                 outcome.removed.total(), stored, outcome.seconds)  # fmt: skip
