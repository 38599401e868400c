"""Sees to it that a worker has an I/O process: starts one where there is none, and connects again."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from orchestrator.cache.client import CacheClient
from orchestrator.cache.io.process import KEEP_BUFFERS
from orchestrator.service.store.io_process import Places

_log = logging.getLogger(__name__)
_TURN_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class IoKeeper:
    """One a worker, with a thread of its own. Of a machine's workers the one that gets the lock starts the process.

    Args:
        spec: for `io_process`, without the lock.

    Attributes:
        starts: processes that this worker has started. reconnects: links after the first.
    """

    def __init__(self, client: CacheClient, places: Places, spec: dict[str, Any]) -> None:
        self.client, self.places, self.spec = client, places, spec
        self.starts = self.reconnects = 0
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._links = 0
        self._up = False
        self._pause_s, self._not_before = _FIRST_PAUSE_S, 0.0
        self._closed = threading.Event()
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-keeper", daemon=True)

    def start(self, timeout_s: float) -> bool:
        """Begin, and wait for the first link. False where none comes in that time: the worker goes on without."""
        self._thread.start()
        return self._connected.wait(timeout_s)

    def close(self) -> None:
        """The process stays as long as other workers use it."""
        self._closed.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._closed.wait(0.0 if not self._links else _TURN_S):
            try:
                self._turn(time.monotonic())
            except Exception as error:  # the worker goes on; so must this
                _log.error("the store's keeper: %s: %s", type(error).__name__, error)
                self._later(time.monotonic())
            if not self._links:
                self._closed.wait(0.05)

    def _turn(self, now: float) -> None:
        ended = self._process.poll() if self._process is not None else None
        if self.client.alive or self.client.retry():
            self._note(up=True)
            return
        self._note(up=False)
        if self._process is not None and ended is None:
            return  # it is starting
        if ended is not None:
            _log.warning("the I/O process ended with status %d: %s", ended, last_words(self.places.log))
            self._process = None
            if ended >= 0:  # not killed: it will hardly do better at once
                self._later(now)
        if now >= self._not_before:
            self._start()

    def _note(self, *, up: bool) -> None:
        if up == self._up:
            return
        self._up = up
        if not up:
            _log.warning("the I/O process is gone; prompts are computed without it until there is one")
            return
        self._links += 1
        self.reconnects = self._links - 1
        self._pause_s = _FIRST_PAUSE_S
        self._connected.set()
        if self.reconnects:
            _log.warning("the I/O process is back")

    def _later(self, now: float) -> None:
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _start(self) -> None:
        """Start it, holding the lock for it; where another process holds it, one is there or about to be."""
        self.places.make()
        lock = os.open(self.places.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            spec = json.dumps({**self.spec, "lock": lock})
            command = [sys.executable, "-m", "orchestrator.service.store.io_process", spec]
            environment = {**KEEP_BUFFERS, **os.environ}
            with self.places.log.open("ab") as log:
                # A session of its own: signals for a worker's group are not for it.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=[lock],
                    start_new_session=True,
                )  # fmt: skip
            self.starts, self.pid = self.starts + 1, self._process.pid
        finally:
            os.close(lock)


def last_words(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2000))
            lines = file.read().decode(errors="replace").splitlines()[-2:]
    except OSError:
        lines = []
    return " | ".join(lines) or "it said nothing"
