"""`fathom serve` as a process of its own: started, watched, asked for its state, ended, and nothing left behind."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.service import processes
from bench.service.processes import Process

ROLES = ("router", "encoder", "prefill", "decode")


@dataclass(frozen=True)
class Shape:
    """What is started. `cluster`: "" for one process with one engine, else the launcher."""

    cluster: str = ""
    prefill: int = 1
    decode: int = 1
    encoder: int = 0

    @property
    def title(self) -> str:
        if not self.cluster:
            return "colocated"
        encoders = f"{self.encoder} encoder + " if self.encoder else ""
        return f"{encoders}{self.prefill} prefill + {self.decode} decode, {self.cluster}"

    def arguments(self) -> list[str]:
        if not self.cluster:
            return []
        counts = {"--prefill": self.prefill, "--decode": self.decode, "--encoder": self.encoder}
        return ["--cluster", self.cluster, *(str(part) for pair in counts.items() for part in pair)]


@dataclass(frozen=True)
class Worker:
    """One line of the status that the front gives."""

    name: str
    role: str
    life: int
    state: str
    pid: int
    held: int
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Stopped:
    """How it ended: exit status of the front, and processes that it left."""

    status: int | None
    left: tuple[Process, ...]
    log: str


class ParkError(RuntimeError):
    """The service did not do what a caller waited for; the end of its log is in the words."""


class Park:
    """One service. Its folder holds log and configuration; `options` are further words of the command line.

    `config`: the content of a configuration file, where one is needed.
    """

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        *,
        model: str | None = None,
        options: tuple[str, ...] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.shape, self.folder = shape, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._mark = secrets.token_hex(8)
        self._log = folder / "serve.log"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "orchestrator.cli", "serve", "--port", str(port), *shape.arguments(), *options]
        if model is not None:
            words += ["--model", model]
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
            words += ["--cluster-config", str(folder / "config.json")]
        self.words = words
        with self._log.open("wb") as log:
            self.front = subprocess.Popen(
                words, cwd=folder, env=os.environ | {processes.MARK: self._mark}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        self._client = httpx.Client(base_url=self.url, timeout=10.0, trust_env=False)

    def __enter__(self) -> Park:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, lines: int = 40) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def wait_serving(self, seconds: float = 300.0) -> None:
        """Until it says so, and every worker is up."""
        self.wait(lambda: "Serving " in self._log.read_text(encoding="utf-8", errors="replace"), seconds, "to serve")
        if self.shape.cluster:
            self.wait_up(seconds)

    def wait_up(self, seconds: float = 120.0) -> None:
        """Every process that the service wants is there; a killed one counts as gone before the front knows."""
        self.wait(self._up, seconds, "to have all workers up")

    def _up(self) -> bool:
        workers = self.workers()
        return bool(workers) and all(w.state == "up" and processes.look(w.pid) is not None for w in workers)

    def wait(self, condition: Callable[[], bool], seconds: float, words: str) -> None:
        """Raises ParkError when it takes longer, or the front ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.front.poll() is not None:
                raise ParkError(f"the service ended with {self.front.returncode} while we waited for it {words}:\n"
                                f"{self.log()}")  # fmt: skip
            if time.monotonic() > deadline:
                raise ParkError(f"waited {seconds:g} s for the service {words}:\n{self.log()}\n{self._state()}")
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        """What GET /cluster/status says."""
        return self._client.get("/cluster/status").raise_for_status().json()

    def health(self) -> dict[str, Any]:
        return self._client.get("/health").json()

    def workers(self) -> list[Worker]:
        """Those that the service wants; none of one process."""
        rows = [row for row in self.status()["workers"] if row["state"] != "gone"] if self.shape.cluster else []
        return [
            Worker(r["name"], r["role"], r["life"], r["state"], r["pid"] or 0, r["held"], r.get("numbers") or {})
            for r in rows
        ]

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers() if worker.name == name)

    def drain(self, name: str) -> httpx.Response:
        return self._client.post("/cluster/drain", params={"worker": name})

    def idle(self) -> bool:
        """Nobody holds anything of any request."""
        if self.health()["requests_in_flight"]:
            return False
        return all(w.held == 0 and not w.numbers.get("bytes offered now") for w in self.workers())

    def wait_idle(self, seconds: float = 60.0) -> None:
        self.wait(self.idle, seconds, "to hold nothing any more")

    def processes(self) -> list[Process]:
        """All that belong to it, front included."""
        return processes.marked(self._mark)

    def memory(self) -> dict[str, int]:
        """Resident bytes by worker, "front" among them."""
        pids = {"front": self.front.pid, **{w.name: w.pid for w in self.workers()}}
        return {name: processes.resident(pid) for name, pid in pids.items()}

    def ask_to_stop(self) -> None:
        if self.front.poll() is None:
            self.front.send_signal(signal.SIGTERM)

    def stop(self, seconds: float = 60.0) -> Stopped:
        """SIGTERM; after so many seconds SIGKILL for whatever is left of it. `left`: what outlived the front."""
        self._client.close()
        self.ask_to_stop()
        try:
            status: int | None = self.front.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        left = processes.wait_gone(self._mark, 10.0) if status is not None else self.processes()
        processes.end(left)
        self.front.wait(10.0)
        return Stopped(status, tuple(left), self.log())

    def _state(self) -> str:
        try:
            return json.dumps(self.status(), indent=1) if self.shape.cluster else json.dumps(self.health())
        except (httpx.HTTPError, ValueError) as error:
            return f"no status: {error}"


def _end_with_parent() -> None:
    """The kernel ends the front when the thread that started it ends, also by a kill."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
