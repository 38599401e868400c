"""What the workers count of the states that moved between them."""

from __future__ import annotations

import time
from typing import Any

from bench.service.park import Park

_BEATS = 1.2  # seconds in which every worker tells its numbers


def read(park: Park, of: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sums over workers, from their numbers in GET /cluster/status; less those of `before`, of the same lives.

    `ahead`: share of bytes that a prefill worker had sent before its prompt was done, thus beside computing.
    `there`: share that a decode worker had before it was told to load. `load_ms`: of a load, what was left to wait for.
    """
    park.wait_idle()
    time.sleep(_BEATS)
    workers = park.workers()
    past = {} if before is None else before["numbers"]
    now = {
        w.name: {key: value - past.get(w.name, {}).get(key, 0.0) for key, value in w.numbers.items()} for w in workers
    }
    out, into = ([now[w.name] for w in workers if w.role == role] for role in ("prefill", "decode"))
    total, handoffs = _sum(into, "bytes in"), _sum(into, "handoffs in")
    return {
        "shape": park.shape.title,
        "of": of,
        "handoffs": int(handoffs),
        "bytes": int(total),
        "ahead": _share(_sum(out, "bytes out ahead"), _sum(out, "bytes out")),
        "taken_ahead": _share(_sum(out, "bytes out taken ahead"), _sum(out, "bytes out")),
        "there": _share(_sum(into, "bytes in ahead"), total),
        "load_ms": _share(1e3 * _sum(into, "seconds in"), handoffs),
        "rate": _share(total - _sum(into, "bytes in ahead"), _sum(into, "seconds in")),
        "numbers": {worker.name: dict(worker.numbers) for worker in workers},
    }


def _sum(some: list[Any], name: str) -> float:
    return sum(numbers.get(name, 0.0) for numbers in some)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
