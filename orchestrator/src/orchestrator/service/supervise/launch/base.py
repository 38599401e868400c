"""What the supervisor asks of whatever starts worker processes. None of it may wait for long."""

from __future__ import annotations

import signal
from typing import Protocol

from orchestrator.service.messages import WorkerSpec


class Handle(Protocol):
    """One life of a worker process.

    Attributes:
        pid: on its node; 0 while it is being started. node: name or address of its machine, empty while unknown.
    """

    @property
    def pid(self) -> int: ...
    @property
    def node(self) -> str: ...

    def poll(self) -> str | None:
        """How it ended ("exit 0", "signal 9", "actor died", "start failed: ..."), None while it lives."""

    def terminate(self) -> None:
        """SIGTERM: drain, then leave."""

    def kill(self) -> None:
        """SIGKILL to it and all that it has started."""

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log, as far as they are known here."""


class Launcher(Protocol):
    """Starts worker processes.

    Attributes:
        host: at which parties of the front have to listen so that the workers reach them.
    """

    @property
    def host(self) -> str: ...

    def start(self, spec: WorkerSpec) -> Handle:
        """Start a process. What goes wrong is told by the handle's `poll`. Call it from a thread that lives as long
        as the workers do: the kernel may end a child with the thread that started it."""

    def close(self) -> None:
        """End what is left, for good. Twice is no error."""


def how_it_ended(status: int) -> str:
    """In words, from a `returncode` of `subprocess`."""
    if status >= 0:
        return f"exit {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
