"""A supervisor with a launcher that starts nothing, and time that tests make pass."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.service.config import ServiceConfig, from_values
from orchestrator.service.messages import Book, Hello, Leave, WorkerSpec
from orchestrator.service.supervise.supervisor import Supervisor


class FakeHandle:
    """Ends when a test says so, or by `kill` where it is not stuck."""

    def __init__(self, spec: WorkerSpec, pid: int) -> None:
        self.spec, self.pid, self.node = spec, pid, "here"
        self.end: str | None = None
        self.kills = self.terms = 0
        self.stuck = False

    def poll(self) -> str | None:
        return self.end

    def terminate(self) -> None:
        self.terms += 1

    def kill(self) -> None:
        self.kills += 1
        if not self.stuck:
            self.end = "signal 9 (SIGKILL)"

    def tail(self, lines: int = 20) -> str:
        return f"last words of {self.spec.name}"


class FakeLauncher:
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.started: list[FakeHandle] = []
        self.refuses = False

    def start(self, spec: WorkerSpec) -> FakeHandle:
        if self.refuses:
            raise OSError("no more processes")
        self.started.append(FakeHandle(spec, 1000 + len(self.started)))
        return self.started[-1]

    def close(self) -> None:
        pass


class Bench:
    """`sent`: what the supervisor said, as (to, message). `books`: what the front's post was told."""

    def __init__(
        self, *, prefill: int = 1, decode: int = 2, encoder: int = 0, now: float = 100.0, **cluster: Any
    ) -> None:
        roles = {"prefill": prefill, "decode": decode, "encoder": encoder}
        self.config = from_values({"roles": roles, "cluster": cluster})
        self.now, self.launcher = now, FakeLauncher()
        self.sent: list[tuple[str, Any]] = []
        self.books: list[dict[str, str]] = []
        self.supervisor = Supervisor(
            self.config,
            self.launcher,
            lambda name, role, life: spec_of(self.config, name, role, life),
            send=lambda to, message: self.sent.append((to, message)),
            know=lambda book: self.books.append(dict(book)),
            address="tcp://front",
            now=self.now,
            wall=lambda: 1_000_000.0 + self.now,
        )
        self.tick(0.0)

    def member(self, name: str) -> Any:
        return self.supervisor.members[name]

    def handle(self, name: str) -> FakeHandle:
        return [handle for handle in self.launcher.started if handle.spec.name == name][-1]

    def lives(self, name: str) -> list[int]:
        return [handle.spec.life for handle in self.launcher.started if handle.spec.name == name]

    def tick(self, seconds: float, *, talk: bool = True) -> None:
        """Let time pass in tenths of a second; all that are up say so each half second if they may talk."""
        for _ in range(max(1, round(seconds * 10))):
            self.now += 0.1 if seconds else 0.0
            if talk and round(self.now * 10) % 5 == 0:
                for member in list(self.supervisor.members.values()):
                    if member.state in ("up", "draining") and member.handle is not None:
                        self.hello(member.name)
            self.supervisor.tick(self.now)

    def hello(self, name: str, life: int | None = None, **more: Any) -> None:
        handle = self.handle(name)
        life = handle.spec.life if life is None else life
        book = more.pop("book", self.supervisor.book.version)
        address = more.pop("address", f"tcp://{name}/{life}")
        self.supervisor.receive(Hello(name, handle.spec.role, life, address, handle.pid, book, **more), self.now)

    def all_up(self) -> Bench:
        for name in list(self.supervisor.members):
            self.hello(name)
        assert self.supervisor.ready
        return self

    def said(self, to: str, kind: type) -> list[Any]:
        return [message for name, message in self.sent if name == to and isinstance(message, kind)]

    def leaves(self, name: str) -> list[Leave]:
        return self.said(name, Leave)

    def books_to(self, name: str) -> list[Book]:
        return self.said(name, Book)


def spec_of(config: ServiceConfig, name: str, role: Any, life: int = 1, folder: Path | str = "/nowhere") -> WorkerSpec:
    return WorkerSpec(name, role, life, config, "127.0.0.1", "tcp://front", "00" * 32, 1, str(folder))


# Children that stand for worker processes: they die with their parent and read their standard input, as those do.

WAITS = """
import os, sys, threading
line = sys.stdin.readline()
print("spec of", len(line), "threads", os.environ["OMP_NUM_THREADS"], flush=True)
sys.stdin.read()
os._exit(3)
"""
DRAINS = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
sys.stdin.readline(); print("ready", flush=True)
sys.stdin.read()
os._exit(3)
"""
FAILS = "import sys; sys.stdin.readline(); print('cannot go on'); sys.exit(7)"
# With a child of its own, which would outlive it.
BREEDS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.stdin.read()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def until(holds: Any, what: str, seconds: float = 60.0) -> Any:
    """Wait for something; its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := holds():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds:g} s")


def file_of(folder: Path, name: str, life: int = 1) -> str:
    log = folder / "logs" / f"{name}-{life}.log"
    return log.read_text() if os.path.exists(log) else ""
