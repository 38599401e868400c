"""What happens to a service while clients stream: processes killed, stopped for a while, drained; all from one seed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from bench.service.park import Park, Worker
from bench.service.processes import look

KINDS = ("kill", "pause", "drain")


@dataclass(frozen=True)
class Fault:
    """`at`: seconds of `time.monotonic`; `unix`: the same in seconds of `time.time`."""

    kind: str
    name: str
    role: str
    life: int
    at: float
    unix: float
    seconds: float = 0.0


def kill(park: Park, worker: Worker) -> Fault | None:
    """SIGKILL; None where the process is gone already."""
    process = look(worker.pid) if worker.pid else None
    if process is None or not process.send(signal.SIGKILL):
        return None
    return _noted("kill", worker)


def pause(park: Park, worker: Worker, seconds: float) -> Fault | None:
    """SIGSTOP and after so long SIGCONT, to that process only."""
    process = look(worker.pid) if worker.pid else None
    if process is None or not process.send(signal.SIGSTOP):
        return None
    fault = _noted("pause", worker, seconds)
    try:
        time.sleep(seconds)
    finally:
        process.send(signal.SIGCONT)
    return fault


def drain(park: Park, worker: Worker) -> Fault | None:
    """None where the front does not take it."""
    return _noted("drain", worker) if park.drain(worker.name).is_success else None


def _noted(kind: str, worker: Worker, seconds: float = 0.0) -> Fault:
    return Fault(kind, worker.name, worker.role, worker.life, time.monotonic(), time.time(), seconds)


class Chaos:
    """Until it is stopped: a fault, then a random wait, from a thread of its own.

    `spare`: at least so many workers of a role are left up when another is hit, so that 1 keeps a service that can
    work and 0 takes whoever it meets. The front is never hit: it owns the requests.
    """

    def __init__(
        self, park: Park, seed: int, *, mean: float, kinds: Sequence[str] = ("kill",), roles: Sequence[str] = (),
        spare: int = 0,
    ) -> None:  # fmt: skip
        self.done: list[Fault] = []
        self.trouble: list[str] = []
        self._park, self._rng, self._mean, self._kinds = park, random.Random(seed), mean, tuple(kinds)
        self._roles, self._spare = frozenset(roles), spare
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._stop.wait(self._rng.expovariate(1 / self._mean)):
            try:
                fault = self._one()
            except (httpx.HTTPError, OSError, KeyError, ValueError) as error:
                self.trouble.append(f"{type(error).__name__}: {error}")
                continue
            if fault is not None:
                self.done.append(fault)

    def _one(self) -> Fault | None:
        up = [w for w in self._park.workers() if w.state == "up" and (not self._roles or w.role in self._roles)]
        up = [w for w in up if sum(o.role == w.role for o in up) > self._spare]
        if not up:
            return None
        worker, kind = self._rng.choice(sorted(up, key=lambda w: w.name)), self._rng.choice(self._kinds)
        if kind == "pause":
            return pause(self._park, worker, self._rng.uniform(1.0, 8.0))
        return drain(self._park, worker) if kind == "drain" else kill(self._park, worker)
