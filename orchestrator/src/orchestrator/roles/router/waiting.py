"""Requests that wait for a prefill worker: bins by length, tenants by fairness inside a bin."""

from __future__ import annotations

from orchestrator.balance.admission import FairQueue
from orchestrator.balance.prefill.bins import PrefillBins, Prompt, key_function
from orchestrator.roles.router.policy import RouterPolicy
from orchestrator.roles.router.records import Record

_SMOOTH = 0.1  # weight of the last start in the pace


class Waiting:
    """Attributes:
    bins: which prefill worker serves which bin.
    seconds: of predicted work that waits. arrived: the same that came since the last round, by bin.
    """

    def __init__(self, policy: RouterPolicy) -> None:
        self.policy = policy
        self.bins = PrefillBins(policy.bins)
        self.seconds = 0.0
        self.missed = 0  # tokens that wait
        self._pace = 0.0
        self._started: float | None = None  # the last start that left others waiting, or since when one waits
        self._queues: list[FairQueue[str]] = [FairQueue(policy.weights) for _ in range(self.bins.count)]
        self._key = key_function(policy.key, policy.cost)
        self._arrived = [0.0] * self.bins.count
        self._queued = [0.0] * self.bins.count

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def cost(self, record: Record) -> float:
        """Predicted seconds of a request's prefill."""
        missed, hit = _missed(record), record.spec.hit if record.spec else 0
        return self.policy.cost.prompt(missed, hit)

    def push(self, record: Record, now: float, *, front: bool) -> None:
        assert record.spec is not None
        if not len(self):
            self._started = now
        length = len(record.spec.prompt) + len(record.output)
        record.state, record.queued = "queued", now
        record.cost = self.cost(record)
        record.bin = self.bins.bin_of(self._key(Prompt(length, _missed(record))))
        self._queues[record.bin].push(record.spec.tenant, record.request, front=front)
        self._arrived[record.bin] += record.cost
        self._add(record, 1)

    def peek(self, number: int) -> str:
        """The request that is next in a bin, empty where none is."""
        head = self._queues[number].peek()
        return "" if head is None else head[1]

    def pop(self, number: int) -> None:
        """The request that is next in a bin leaves it."""
        self._queues[number].pop()

    def pace(self, now: float) -> float:
        """Seconds between two starts of late, where others waited; a start that is overdue counts at once."""
        overdue = 0.0 if self._started is None else now - self._started
        return max(self._pace, overdue)

    def charge(self, record: Record, now: float) -> None:
        """A popped request starts."""
        if self._started is not None:
            self._pace += _SMOOTH * (now - self._started - self._pace)
        self._started = now if len(self) else None
        assert record.spec is not None
        self._queues[record.bin].charge(record.spec.tenant, missed=_missed(record), hit=record.spec.hit)
        self._add(record, -1)

    def charge_output(self, record: Record, tokens: int) -> None:
        if record.spec is not None and record.bin >= 0:
            self._queues[record.bin].charge(record.spec.tenant, output=tokens)

    def remove(self, record: Record) -> None:
        assert record.spec is not None
        if self._queues[record.bin].remove(record.spec.tenant, record.request):
            self._add(record, -1)

    def round(self, seconds: float) -> None:
        """Size the bins by what came and what waits."""
        if self.bins.engines:
            self.bins.round(self._arrived, self._queued, seconds)
        self._arrived = [0.0] * self.bins.count
        for queue in self._queues:
            queue.forget_idle()

    def _add(self, record: Record, sign: int) -> None:
        self.seconds = max(0.0, self.seconds + sign * record.cost)
        self.missed += sign * _missed(record)
        self._queued[record.bin] = max(0.0, self._queued[record.bin] + sign * record.cost)


def _missed(record: Record) -> int:
    assert record.spec is not None
    return len(record.spec.prompt) + len(record.output) - record.spec.hit
