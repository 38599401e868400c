"""What the router's whole core costs with many engines: the same state machine that serves, on one core. Measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean
from typing import Any

from kernel_core.check import require
from orchestrator.balance.admission import Limits
from orchestrator.balance.paths import PathSettings
from orchestrator.roles.messages import Holding, Release, Report, RequestSpec, Send, Start, Submit, Tick
from orchestrator.roles.messages.work import AssignPrefill
from orchestrator.roles.router import Router, RouterPolicy
from orchestrator.roles.settings import Settings
from orchestrator.simulate.figures.published import POOL, TOKEN_BYTES

_GROUP, _LENGTH, _HIT = 64, 118_000, 113_000
_ON_DECODE, _ON_PREFILL = 20, 3  # requests that each holds
_ROOM = int(POOL.value / TOKEN_BYTES.value)


def core(engines: int, calls: int) -> dict[str, Any]:
    """Microseconds of core time for each thing that a router is told, half of `engines` in prefill, half in decode.

    Every engine holds requests, so reports and beats cost what they do in service. `a_second`: requests a second that
    one core carries beside the reports and beats of all engines.
    """
    require(engines >= 2, "engines", engines, "2 or more")
    require(calls >= 1, "calls", calls, "1 or more")
    fleet = _Fleet(engines)
    submit, release = fleet.requests(calls)
    report, beat = fleet.reports(calls), fleet.beats()
    fixed = (engines * report + beat) / fleet.settings.beat / 1e6
    return {
        "engines": engines,
        "submit": submit,
        "release": release,
        "report": report,
        "beat": beat,
        "fixed": fixed,
        "request": submit + release,
        "a_second": max(0.0, 1 - fixed) * 1e6 / (submit + release),
    }


class _Fleet:
    """A router in the middle of its work."""

    def __init__(self, engines: int) -> None:
        self.settings = Settings()
        limits = Limits(context=1 << 20, pool=_ROOM, target=2.0, patience=1e6)
        paths = PathSettings(busy=1 << 62, slow=1 << 62)
        self.router = Router(policy=RouterPolicy(limits=limits, paths=paths, load=0.0), settings=self.settings)
        self.now, self.number = 0.0, 0
        self.half = engines // 2
        self.prompt = tuple(range(_LENGTH))
        self.router.step(Start(), self.now)
        self.now = 2 * self.settings.settle
        for engine in range(2 * self.half):
            self.router.step(self._report(engine), self.now)

    def requests(self, calls: int) -> tuple[float, float]:
        """Microseconds of a `Submit` that is placed at once, and of the `Release` that ends it."""
        submits, releases = [], []
        for _ in range(calls):
            self.number += 1
            name = f"r{self.number}"
            spec = RequestSpec(self.prompt, 4096, tenant=f"t{self.number % 100}", hit=_HIT, expected_output=440)
            begin = time.thread_time_ns()
            actions = self.router.step(Submit(name, 1, "entry", spec), self.now)
            submits.append(time.thread_time_ns() - begin)
            placed = any(isinstance(a, Send) and isinstance(a.message, AssignPrefill) for a in actions)
            require(placed, "engines", 2 * self.half, "enough of them for a request to be placed at once")
            begin = time.thread_time_ns()
            self.router.step(Release(name, 1, ended=True, output=440), self.now)
            releases.append(time.thread_time_ns() - begin)
        return mean(submits) / 1e3, mean(releases) / 1e3

    def reports(self, calls: int) -> float:
        """Microseconds of a report, of prefill and decode engines in turn."""
        return _timed(lambda i: self.router.step(self._report(i % (2 * self.half)), self.now), calls)

    def beats(self) -> float:
        """Microseconds of a beat, at which everything is looked at."""

        def beat(_: int) -> None:
            self.now += self.settings.beat
            for view in self.router.fleet.views.values():  # reported in time
                view.seen = self.now
            for record in self.router.records.values():
                record.seen = record.wanted = self.now

        cost = []
        for i in range(4):
            beat(i)
            begin = time.thread_time_ns()
            self.router.step(Tick(), self.now)
            cost.append((time.thread_time_ns() - begin) / 1e3)
        return mean(cost)

    def _report(self, engine: int) -> Report:
        self.number += 1
        prefill = engine < self.half
        held = _ON_PREFILL if prefill else _ON_DECODE
        holding = tuple(Holding(f"h{engine}-{i}", 1, "entry", _LENGTH, decoding=not prefill) for i in range(held))
        return Report(
            f"w{engine:04}",
            "prefill" if prefill else "decode",
            1,
            self.number,
            "active",
            holding,
            room=1e6 if prefill else float(_ROOM - held * _LENGTH),
            capacity=1e6 if prefill else float(_ROOM),
            node=f"n{engine // 8}",
            group="" if prefill else f"g{engine // _GROUP}",
        )


def _timed(call: Callable[[int], object], calls: int) -> float:
    begin = time.thread_time_ns()
    for i in range(calls):
        call(i)
    return (time.thread_time_ns() - begin) / 1e3 / calls
