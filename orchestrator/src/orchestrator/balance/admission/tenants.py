"""Fairness between tenants by tokens: whoever has been served least goes next (virtual token counters)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kernel_core.check import require

T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """Charge of a token, by kind: a cached one costs a read, an output one a share of a decode step."""

    missed: float = 1.0
    hit: float = 0.05
    output: float = 2.0


@dataclass
class _Tenant(Generic[T]):
    counter: float = 0.0
    share: float = 1.0
    queue: deque[T] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """Requests of several tenants; each tenant's own in order, tenants by what they were charged over their share.

    A tenant that comes back from having nothing to do starts at the least counter of those that wait, so that idleness
    saves up nothing. A tenant without requests and with no more than that is forgotten.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights or Weights()
        self._tenants: dict[str, _Tenant[T]] = {}
        self._level = 0.0  # of the tenant that was served last

    def __len__(self) -> int:
        return sum(len(t.queue) for t in self._tenants.values())

    def share(self, tenant: str, share: float) -> None:
        """A tenant with twice the share gets twice the tokens where both have work. 1 by default."""
        require(share > 0, "share", share, "above 0")
        self._tenants.setdefault(tenant, _Tenant(self._level)).share = share

    def push(self, tenant: str, request: T, *, front: bool = False) -> None:
        """`front` puts back a request that was taken and could not start; the charge is taken back by the caller."""
        known = self._tenants.setdefault(tenant, _Tenant(self._level))
        if not known.queue:
            active = [t.counter for t in self._tenants.values() if t.queue]
            known.counter = max(known.counter, min(active, default=self._level))
        known.queue.appendleft(request) if front else known.queue.append(request)

    def peek(self) -> tuple[str, T] | None:
        """The next request and its tenant, or None. Nothing is charged."""
        waiting = [(t.counter, name) for name, t in self._tenants.items() if t.queue]
        if not waiting:
            return None
        name = min(waiting)[1]
        return name, self._tenants[name].queue[0]

    def pop(self) -> tuple[str, T] | None:
        """`peek`, and the request leaves. Charge it when it starts, or a tenant's whole queue would be served."""
        head = self.peek()
        if head is not None:
            tenant = self._tenants[head[0]]
            tenant.queue.popleft()
            self._level = tenant.counter
        return head

    def remove(self, tenant: str, request: T) -> bool:
        """A request that was cancelled; whether it was there."""
        known = self._tenants.get(tenant)
        if known is None or request not in known.queue:
            return False
        known.queue.remove(request)
        return True

    def charge(self, tenant: str, *, missed: int = 0, hit: int = 0, output: int = 0) -> None:
        """Tokens that were served. Negative ones give back what was charged for nothing."""
        w = self.weights
        known = self._tenants.setdefault(tenant, _Tenant(self._level))
        known.counter += (w.missed * missed + w.hit * hit + w.output * output) / known.share

    def counter(self, tenant: str) -> float:
        return self._tenants[tenant].counter if tenant in self._tenants else self._level

    def forget_idle(self) -> None:
        """Drop tenants whose counter says no more than that of a new one would."""
        idle = [n for n, t in self._tenants.items() if not t.queue and t.counter <= self._level and t.share == 1.0]
        for name in idle:
            del self._tenants[name]
