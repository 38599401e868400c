"""Posts that are closed, ports that do as they are told, worker processes that never outlive their test."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    Drop,
    Dropped,
    Export,
    Exported,
    PrefillDone,
    Reform,
    Reformed,
    RunDecode,
    RunPrefill,
)
from orchestrator.service.config import ServiceConfig
from orchestrator.service.messages import Hello, WorkerSpec
from orchestrator.service.post.post import Post

SECRET = b"of this service, 32 bytes long.."
LONG = 60.0  # seconds; nothing here takes as many, but on a machine that does much else


def until(what: Callable[[], Any], seconds: float = LONG) -> Any:
    """Wait until something is true, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"not within {seconds} s")


class Heard:
    """An inbox."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []

    def __call__(self, to: str, message: Any) -> None:
        self.messages.append((to, message))

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.messages if type(message) is kind]

    def hello(self, name: str, life: int = 1) -> Hello | None:
        """The last word of that life of a worker."""
        found = [m for m in self.of(Hello) if (m.name, m.life) == (name, life)]
        return found[-1] if found else None


class ScriptedPort:
    """`answer(command)` gives an answer, raises, or gives None; it may wait. Without it: what a sound engine says."""

    layout = "toy"

    def __init__(self, answer: Callable[[Any], Any] | None = None) -> None:
        self.commands: list[Any] = []
        self.threads: set[str] = set()
        self.pictures: list[tuple[str, bytes]] = []
        self._answer = answer or sound
        self._answers: list[Any] = []

    def do(self, command: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.commands.append(command)
        answer = self._answer(command)
        if answer is not None:
            self._answers.append(answer)

    def answers(self) -> list[Any]:
        answers, self._answers = self._answers, []
        return answers

    def pixels(self, digest: str, payload: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        self.pictures.append((digest, payload))


def sound(c: Any) -> Any:
    if isinstance(c, Begin):
        return Began(c.request, c.epoch, 0)
    if isinstance(c, RunPrefill):
        return PrefillDone(c.step, 0.0)
    if isinstance(c, RunDecode):
        return DecodeDone(c.step, ())
    if isinstance(c, Export):
        return Exported(c.request, c.epoch, None, (), "not here")
    if isinstance(c, Drop):
        return Dropped(c.request, c.epoch)
    if isinstance(c, Reform):
        return Reformed(c.number, 1, 1000.0, 4)
    return None


class Supervisor:
    """A post that hears what workers say. Close it."""

    def __init__(self, *names: str, heard: Heard | None = None) -> None:
        self.heard = heard or Heard()
        self.post = Post(self.heard, secret=SECRET)
        self._own = {name: self.post.address for name in ("supervisor", "scaler", *names)}
        self.know({})

    def know(self, addresses: dict[str, str]) -> None:
        self.post.know({**self._own, **addresses})

    def spec(self, name: str, config: ServiceConfig, folder: Any, *, life: int = 1) -> WorkerSpec:
        role: Any = name.split("-")[0]
        return WorkerSpec(
            name, role, life, config, "127.0.0.1", self.post.address, SECRET.hex(), 1, str(folder), node="here"
        )


class Worker:
    """A worker process. `end` it."""

    def __init__(self, spec: WorkerSpec | bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.service.process"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = spec if isinstance(spec, bytes) else msgspec.json.encode(spec)
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line.decode(errors="replace")

    def wait(self) -> int:
        status = self.process.wait(LONG)
        self._reader.join(LONG)
        return status

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LONG)
        self._reader.join(LONG)
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()
