"""A worker process as a child of this one: used by the local launcher, and on each node by Ray's keepers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.service.messages import WorkerSpec

COMMAND = (sys.executable, "-m", "orchestrator.service.process")
_MOST_TAIL = 64 << 10  # bytes of a log that are read for its last lines


class Child:
    """Reads its spec as the first line of its standard input, which stays open: its end tells that we are gone.

    Its output goes to a file `NAME-LIFE.log`. It has a process group of its own, so that a Ctrl+C at the terminal
    reaches the front alone, and so that all that it has started can be ended with it.
    """

    def __init__(self, spec: WorkerSpec, command: Sequence[str] = COMMAND) -> None:
        folder = Path(spec.folder) / "logs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log = folder / f"{spec.name}-{spec.life}.log"
        # The kernels' threads take their number from the environment when they are loaded.
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec.threads), "PYTHONUNBUFFERED": "1"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and `poll` says so
            self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self.process.stdin.flush()

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Its `returncode` once it has ended."""
        status = self.process.poll()
        if status is not None:
            self._close_input()
        return status

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()

    def end(self, timeout: float = 5.0) -> None:
        """Kill it and wait."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        self._close_input()

    def tail(self, lines: int = 20) -> str:
        return tail(self.log, lines)

    def _close_input(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


def tail(file: Path, lines: int) -> str:
    """The last lines of a text file, empty if there is none."""
    try:
        with open(file, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _MOST_TAIL))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
