"""Worker processes as children of the front, all on this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from orchestrator.service.messages import WorkerSpec
from orchestrator.service.supervise.launch.base import how_it_ended
from orchestrator.service.supervise.launch.child import COMMAND, Child


class LocalHandle:
    """See `Handle`."""

    def __init__(self, spec: WorkerSpec, command: Sequence[str]) -> None:
        self.node = spec.node or socket.gethostname()
        self._child: Child | None = None
        self._failed = ""
        try:
            self._child = Child(spec, command)
        except OSError as error:
            self._failed = f"start failed: {error}"

    @property
    def pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    def poll(self) -> str | None:
        if self._child is None:
            return self._failed
        status = self._child.poll()
        return None if status is None else how_it_ended(status)

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def tail(self, lines: int = 20) -> str:
        return self._failed if self._child is None else self._child.tail(lines)

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        if self._child is not None:
            self._child.end()


class LocalLauncher:
    """See `Launcher`. `command` is run for each worker."""

    def __init__(self, host: str = "127.0.0.1", command: Sequence[str] = COMMAND) -> None:
        self.host, self._command = host, tuple(command)
        self._handles: list[LocalHandle] = []

    def start(self, spec: WorkerSpec) -> LocalHandle:
        handle = LocalHandle(spec, self._command)
        self._handles = [h for h in self._handles if h.poll() is None]
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in self._handles:
            handle.kill()
        for handle in self._handles:
            handle.end()
        self._handles = []
