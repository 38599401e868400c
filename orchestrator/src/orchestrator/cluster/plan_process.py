"""Planning in a process of its own, so that no step waits for it. `python -m orchestrator.cluster.plan_process`."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Protocol

import numpy as np

from orchestrator.balance.eplb.domains import Domain
from orchestrator.balance.eplb.placement import Placement
from orchestrator.balance.eplb.planner import Decision, plan
from orchestrator.balance.eplb.settings import EplbSettings
from orchestrator.cluster.wire import decode, encode

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `plan`."""

    loads: np.ndarray
    current: Placement
    settings: EplbSettings
    alive: np.ndarray
    domain: Domain = 0

    def run(self) -> Decision:
        return plan(self.loads, self.current, self.settings, self.alive, self.domain)


class Planner(Protocol):
    """Plans one thing at a time."""

    @property
    def busy(self) -> bool: ...

    def start(self, request: PlanRequest) -> None: ...

    def poll(self) -> Decision | None:
        """The decision once it is there; never waits."""

    def close(self) -> None: ...


class PlanHere:
    """Plans at the first `poll`, in the caller: for tests and simulations."""

    def __init__(self) -> None:
        self._request: PlanRequest | None = None

    @property
    def busy(self) -> bool:
        return self._request is not None

    def start(self, request: PlanRequest) -> None:
        self._request = request

    def poll(self) -> Decision | None:
        request, self._request = self._request, None
        return None if request is None else request.run()

    def close(self) -> None:
        self._request = None


class PlanProcess:
    """A process a plan. One that fails is logged and counted, and nothing moves.

    Attributes:
        failed: plans that came to nothing that way.
    """

    def __init__(self) -> None:
        self.failed = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None

    @property
    def busy(self) -> bool:
        return self._process is not None

    def start(self, request: PlanRequest) -> None:
        with tempfile.TemporaryFile() as question:
            question.write(encode(request))
            question.seek(0)
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115
            command = [sys.executable, "-m", "orchestrator.cluster.plan_process"]
            self._process = subprocess.Popen(command, stdin=question, stdout=self._answer)

    def poll(self) -> Decision | None:
        if self._process is None or self._process.poll() is None:
            return None
        assert self._answer is not None
        code, self._process = self._process.returncode, None
        with self._answer as answer:
            answer.seek(0)
            data = answer.read()
        if code != 0:
            self.failed += 1
            _log.warning("planning experts' places ended with status %d; nothing moves", code)
            return None
        return decode(data, Decision)

    def close(self) -> None:
        """End a planning that is under way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> int:
    """A request on standard input, the decision on standard output."""
    sys.stdout.buffer.write(encode(decode(sys.stdin.buffer.read(), PlanRequest).run()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
