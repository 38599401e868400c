"""Processes of one service, found by a mark in their environment: whoever inherits it belongs to it, orphans too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "FATHOM_BENCH_SERVICE"


@dataclass(frozen=True)
class Process:
    """`began` tells it from a later process that got the same number."""

    pid: int
    parent: int
    began: int
    command: str

    def alive(self) -> bool:
        found = look(self.pid)
        return found is not None and found.began == self.began

    def send(self, number: int) -> bool:
        """False if it is gone."""
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def look(pid: int) -> Process | None:
    """None for a process that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else Process(pid, int(fields[1]), int(fields[19]), command)


def marked(mark: str) -> list[Process]:
    """Every process that was started with `MARK=mark`, in order of its number."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            process = look(int(entry.name)) if wanted in environment else None
            if process is not None:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def resident(pid: int) -> int:
    """Bytes in memory; 0 for a process that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_gone(mark: str, seconds: float) -> list[Process]:
    """Those that are still there after so long."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end(processes: Iterable[Process]) -> None:
    """Without further words."""
    for process in processes:
        process.send(signal.SIGKILL)
