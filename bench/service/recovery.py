"""After the kill of one process under load: until it works again, and the longest silence that a client met."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench.service import asks, faults
from bench.service.answers import Answer
from bench.service.clients import complaints, run_crowd
from bench.service.park import Park, ParkError, Worker


def measure(
    park: Park, model: str, expected_of: Callable[[Sequence[asks.Ask]], Mapping[str, Answer]], *, kills: int = 3,
    clients: int = 8, seed: int = 11, step: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row a kill. `expected_of` gives the answers that an undisturbed service gives.

    `gap_s`: longest silence of any client after the kill, waiting for a first token included; `flowing_gap_s`: of those
    whose answer was on its way. `stopped`: how many of these had more than a second of silence.
    """
    rows = []
    roles = list(dict.fromkeys(worker.role for worker in park.workers()))
    for role in roles:
        for number in range(kills):
            kinds = ("image",) if role == "encoder" else ("sampled", "long", "shared")
            some = asks.make(seed + 100 * number, 2 * clients, model=model, kinds=kinds, tokens=160, long=500)
            expected = expected_of(some)
            park.wait_up()
            rows.append(_one(park, role, number, some, expected, clients) | {"shape": park.shape.title})
            step()
    return rows


def _one(
    park: Park, role: str, number: int, some: Sequence[asks.Ask], expected: Mapping[str, Answer], clients: int
) -> dict[str, Any]:
    got: dict[str, Answer] = {}
    load = threading.Thread(target=lambda: got.update(run_crowd(park.url, some, at_once=clients)), daemon=True)
    load.start()
    time.sleep(1.5 + 0.5 * number)
    victims = [worker for worker in park.workers() if worker.role == role]
    victim = max(victims, key=lambda worker: worker.held)
    fault = faults.kill(park, victim)
    if fault is None:
        raise ParkError(f"{victim.name} was gone before it was killed")
    up = _until_up(park, victim)
    load.join(timeout=300)
    gaps = [gap_around(answer, fault.at) for answer in got.values()]
    flowing = [gap_around(a, fault.at) for a in got.values() if a.times and a.times[0] < fault.at < a.times[-1]]
    return {
        "role": role,
        "held": victim.held,
        "up_s": up - fault.at,
        "gap_s": max(gaps, default=0.0),
        "flowing": len(flowing),
        "flowing_gap_s": max(flowing, default=0.0),
        "stopped": sum(gap > 1.0 for gap in flowing),
        "requests": len(some),
        "wrong": complaints(expected, got) | {ask.name: "no answer" for ask in some if ask.name not in got},
    }


def gap_around(answer: Answer, at: float) -> float:
    """The longest time between two events of a client that ended after the moment `at`; 0 if none did."""
    marks = [answer.began, *answer.times]
    return max((b - a for a, b in pairwise(marks) if b > at), default=0.0)


def _until_up(park: Park, victim: Worker) -> float:
    park.wait(lambda: _is_up(park, victim), 180, f"to have {victim.name} again")
    return time.monotonic()


def _is_up(park: Park, victim: Worker) -> bool:
    now = park.worker(victim.name)
    return now.life > victim.life and now.state == "up"
