"""Talking to all targets at once: parallel writes, reads that hedge, and who is known to be dead."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import count

from orchestrator.cache.block_object import WrongBytes
from orchestrator.cache.erasure import shard as shards
from orchestrator.cache.erasure.code import DATA
from orchestrator.cache.erasure.read import Ask, Bad, Came, Done, Down, Event, Fail, Start, StripeRead, Tick
from orchestrator.cache.erasure.shard import Stripe
from orchestrator.cache.erasure.targets import Target

_FIRST_HEDGE_S = 0.05
_SHORTEST_HEDGE_S = 0.001


class ReadResult:
    """What a stripe's read gave: `bodies` has ten where it worked; `bad` are shards to repair."""

    def __init__(self) -> None:
        self.bodies: dict[int, bytes] = {}
        self.bad: list[int] = []
        self.lost = False
        self.asked = 0


class TargetPool:
    """The targets of a store, and their threads.

    Args:
        ask: shards that a read asks at first.
        timeout_s: a target that takes longer counts as dead.
        retry_s: after so long a dead target is tried again.
        threads: for each target, so that one that hangs holds nobody else up.
    """

    def __init__(
        self, targets: Sequence[Target], *, ask: int = DATA + 1, timeout_s: float = 5.0, retry_s: float = 10.0,
        threads: int = 4, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.by_name: Mapping[str, Target] = {target.name: target for target in targets}
        if len(self.by_name) != len(targets):
            raise ValueError("targets: allowed are targets with different names")
        self.ask, self.timeout_s, self.retry_s, self._clock = ask, timeout_s, retry_s, clock
        self._dead: dict[str, tuple[float, float]] = {}  # since when, and the last try
        self._seconds: deque[float] = deque(maxlen=256)
        self._lock = threading.Lock()
        self._pools = {name: ThreadPoolExecutor(threads, f"target-{name}") for name in self.by_name}
        self._begun: dict[str, dict[int, float]] = {name: {} for name in self.by_name}
        self._tokens = count()

    @property
    def domains(self) -> dict[str, str]:
        """Name -> failure domain of the targets that are not known to be dead."""
        dead = self.dead()
        return {name: target.domain for name, target in self.by_name.items() if name not in dead}

    def dead(self) -> dict[str, float]:
        """Targets known to be dead, with the time since when."""
        with self._lock:
            return {name: since for name, (since, _) in self._dead.items()}

    def hedge_s(self) -> float:
        """The 95th percentile of recent shard reads."""
        with self._lock:
            seen = sorted(self._seconds)
        return max(_SHORTEST_HEDGE_S, seen[len(seen) * 95 // 100]) if len(seen) >= 20 else _FIRST_HEDGE_S

    def put(self, stripe: int, writes: Mapping[int, tuple[str, bytes]]) -> dict[int, OSError]:
        """Write shards {number: (target, bytes)} of a stripe side by side. Returns those that failed."""
        dead = {number for number, (target, _) in writes.items() if self._is_dead(target)}
        jobs = {
            self._pools[target].submit(self._put, target, shards.name(stripe, number), data): number
            for number, (target, data) in writes.items()
            if number not in dead
        }
        done, late = wait_for(jobs, timeout=self.timeout_s)
        failed = {jobs[job]: OSError(errno.ETIMEDOUT, "no answer") for job in late}
        for job in done:
            error = job.exception()
            if isinstance(error, OSError):
                failed[jobs[job]] = error
            elif error is not None:
                raise error
        for number, error in failed.items():
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._died(writes[number][0])
        return failed | {number: OSError(errno.EHOSTDOWN, "dead a moment ago") for number in dead}

    def delete(self, placed: Mapping[int, str], stripe: int) -> None:
        """Remove shards; targets that do not answer keep theirs until the next scan for orphans."""
        jobs: list[Future[None]] = [
            self._pools[target].submit(self._delete, target, shards.name(stripe, number))
            for number, target in placed.items()
            if not self._is_dead(target)
        ]
        wait_for(jobs, timeout=self.timeout_s)

    def read(self, stripe: Stripe, placed: Sequence[str], absent: Sequence[int] = ()) -> ReadResult:
        """Any ten shards that verify. `absent` are shards that were found missing."""
        result, now = ReadResult(), self._clock()
        dead = {n for n, target in enumerate(placed) if self._is_dead(target)}
        core = StripeRead(dead | set(absent), self.hedge_s(), self.ask)
        answers: queue.SimpleQueue[tuple[Event, bytes]] = queue.SimpleQueue()
        begun = dict.fromkeys(range(len(placed)), now)
        open_, deadline = set[int](), now + self.timeout_s
        events: list[Event] = [Start()]
        while True:
            for action in [a for event in events for a in core.step(event, self._clock())]:
                match action:
                    case Ask(numbers):
                        result.asked += len(numbers)
                        open_.update(numbers)
                        for number in numbers:
                            begun[number] = self._clock()
                            self._ask(stripe, number, placed[number], answers)
                    case Done():
                        return result
                    case Fail(lost):
                        result.lost = lost
                        result.bodies.clear()
                        return result
            now = self._clock()
            until = deadline if core.hedge_at is None else min(deadline, core.hedge_at)
            try:
                event, body = answers.get(timeout=max(0.0, until - now))
            except queue.Empty:
                events = [Tick()]
                if self._clock() >= deadline:
                    for number in open_:
                        self._died(placed[number])
                    events = [Down(number) for number in sorted(open_)]
                continue
            events = [event]
            assert isinstance(event, (Came, Bad, Down))
            open_.discard(event.shard)
            if isinstance(event, Came):
                result.bodies[event.shard] = body
                with self._lock:
                    self._seconds.append(self._clock() - begun[event.shard])
            elif isinstance(event, Bad):
                result.bad.append(event.shard)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, target: str, name: str, data: bytes) -> None:
        self.by_name[target].put(name, data)
        self._lives(target)

    def _delete(self, target: str, name: str) -> None:
        try:
            self.by_name[target].delete(name)
        except OSError:
            self._died(target)

    def _ask(self, stripe: Stripe, number: int, target: str, answers: queue.SimpleQueue[tuple[Event, bytes]]) -> None:
        pool, token = self._pools.get(target), next(self._tokens)
        if pool is None:  # not one of our targets any more
            answers.put((Down(number), b""))
            return
        with self._lock:
            self._begun[target][token] = self._clock()
        asked = pool.submit(self._get, stripe, number, target, answers)
        asked.add_done_callback(lambda _: self._begun[target].pop(token, None))

    def _get(self, stripe: Stripe, number: int, target: str, answers: queue.SimpleQueue[tuple[Event, bytes]]) -> None:
        try:
            data = self.by_name[target].get(shards.name(stripe.number, number))
        except Exception:  # whatever a remote client raises, the target did not answer
            self._died(target)
            answers.put((Down(number), b""))
            return
        self._lives(target)
        try:
            answers.put((Came(number), shards.verify(data or b"", stripe, number)))
        except WrongBytes:
            answers.put((Bad(number), b""))

    def _is_dead(self, target: str) -> bool:
        if target not in self.by_name:
            return True
        now = self._clock()
        with self._lock:
            since, tried = self._dead.get(target, (now, None))
            oldest = min(list(self._begun[target].values()), default=now)
            if now - oldest >= self.timeout_s:  # it hangs; reads go on without it, so none of them would notice
                self._dead[target], tried = (since, now), now
        return tried is not None and now - tried < self.retry_s

    def _died(self, target: str) -> None:
        with self._lock:
            now = self._clock()
            self._dead[target] = (self._dead.get(target, (now, now))[0], now)

    def _lives(self, target: str) -> None:
        with self._lock:
            self._dead.pop(target, None)
