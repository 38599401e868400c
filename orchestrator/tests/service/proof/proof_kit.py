"""What the tests of this folder share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.service import asks
from bench.service.answers import Answer
from bench.service.asks import Ask
from bench.service.clients import complaints, run_crowd
from bench.service.park import Park
from bench.service.reference import Reference

MODEL = "v41-mini"


def options(device: str) -> tuple[str, ...]:
    """Of `fathom serve`, for a service and for the process beside it."""
    return ("--max-requests", "300", *(() if device == "cpu" else ("--device", device)))


def config(folder: Path, grace: float = 1.0) -> dict:
    """A store that the workers share, and a grace that a test can wait for."""
    return {
        "store": {"kind": "embedded", "folder": str(folder / "store"), "capacity_gb": 0.5},
        "cluster": {"grace": grace},
    }


def some(seed: int, count: int, **options) -> list[Ask]:
    return asks.make(seed, count, model=MODEL, **{"tokens": 64, "long": 600, **options})


def lasting(seed: int, count: int, tokens: int) -> list[Ask]:
    """Requests with answers of exactly so many tokens."""
    return [
        asks.one(seed, number, model=MODEL, kind="sampled", protocol="chat", tokens=tokens) for number in range(count)
    ]


def counted(park: Park) -> Counter[str]:
    """Numbers of all workers, summed by role."""
    found: Counter[str] = Counter()
    for worker in park.workers():
        found.update({f"{worker.role} {name}": value for name, value in worker.numbers.items()})
    return found


def every_kind(seed: int) -> list[Ask]:
    """One request of each kind in each protocol."""
    return [
        asks.one(seed, number, model=MODEL, kind=kind, protocol=protocol, tokens=48, long=400)
        for number, (kind, protocol) in enumerate((k, p) for k in asks.KINDS for p in asks.PATHS)
    ]


def check(reference: Reference, park: Park, wanted: Sequence[Ask], at_once: int = 8) -> dict[str, Answer]:
    """Every answer of the service is that of one undisturbed process."""
    expected = reference.answers(wanted)
    got = run_crowd(park.url, wanted, at_once=at_once)
    assert complaints(expected, got) == {} and got.keys() == expected.keys()
    return got


class Load:
    """Clients in a thread of their own, while a test does something to the service."""

    def __init__(
        self, park: Park, wanted: Sequence[Ask], at_once: int, leave: Callable[[Ask], int | None] = lambda ask: None
    ) -> None:
        self.got: dict[str, Answer] = {}
        self.ended = 0
        self._thread = threading.Thread(target=self._run, args=(park.url, wanted, at_once, leave), daemon=True)

    def _run(self, url: str, wanted: Sequence[Ask], at_once: int, leave: Callable[[Ask], int | None]) -> None:
        self.got = run_crowd(url, wanted, at_once=at_once, leave=leave, done=self._one)

    def _one(self, ask: Ask, answer: Answer) -> None:
        self.ended += 1

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=240)
        assert not self._thread.is_alive(), f"clients still wait; {self.ended} have ended"
