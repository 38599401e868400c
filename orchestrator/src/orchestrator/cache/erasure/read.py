"""Reading one stripe: whom to ask, and when to ask more. A state machine without I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.cache.erasure.code import DATA, SHARDS


@dataclass(frozen=True)
class Start:
    pass


@dataclass(frozen=True)
class Came:
    """A shard came and verified."""

    shard: int


@dataclass(frozen=True)
class Bad:
    """A target answered without this shard, or with other bytes."""

    shard: int


@dataclass(frozen=True)
class Down:
    """A target did not answer."""

    shard: int


@dataclass(frozen=True)
class Tick:
    pass


@dataclass(frozen=True)
class Ask:
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """Ten have verified."""


@dataclass(frozen=True)
class Fail:
    """Ten cannot come any more. `lost`: not because targets are down, but because shards are bad."""

    lost: bool


Event = Start | Came | Bad | Down | Tick
Action = Ask | Done | Fail


class StripeRead:
    """Asks `ask` targets and is done with any ten.

    The rest is asked as soon as a target is known to be dead or answers wrongly, or when the `hedge_s`-th second passes
    without ten. Data shards come before parity, since ten of them need no arithmetic.

    Args:
        doubtful: shards whose targets were dead a moment ago, or that were found missing: asked only if ten cannot
            come without them.
    """

    def __init__(self, doubtful: Collection[int], hedge_s: float, ask: int = DATA + 1) -> None:
        if not DATA <= ask <= SHARDS:
            raise ValueError(f"ask: got {ask}, allowed are {DATA} to {SHARDS}")
        self._live = [n for n in range(SHARDS) if n not in doubtful]
        self._hedge_s = hedge_s
        self._ask = SHARDS if len(self._live) < SHARDS else ask
        self._asked: set[int] = set()
        self._came: set[int] = set()
        self._bad: set[int] = set()
        self._down: set[int] = set()
        self._over = False
        self.hedge_at: float | None = None

    def step(self, event: Event, now: float) -> list[Action]:
        if self._over:
            return []
        match event:
            case Start():
                self.hedge_at = now + self._hedge_s
                return self._more(self._ask)
            case Came(shard):
                self._came.add(shard)
                if len(self._came) < DATA:
                    return []
                self._over = True
                return [Done()]
            case Bad(shard):
                self._bad.add(shard)
                return self._more(SHARDS)
            case Down(shard):
                self._down.add(shard)
                return self._more(SHARDS)
            case Tick():
                return self._more(SHARDS) if self.hedge_at is not None and now >= self.hedge_at else []

    def _more(self, count: int) -> list[Action]:
        """Ask live targets up to so many in all; fail where ten cannot come."""
        failed = self._bad | self._down
        wanted = self._live[:count]
        if len(set(self._live) - failed) < DATA:
            wanted = list(range(SHARDS))
        if SHARDS - len(failed) < DATA:
            self._over = True
            return [Fail(lost=len(self._bad) > SHARDS - DATA)]
        new = tuple(n for n in wanted if n not in self._asked)
        self._asked.update(new)
        if self._asked.issuperset(self._live):
            self.hedge_at = None
        return [Ask(new)] if new else []
