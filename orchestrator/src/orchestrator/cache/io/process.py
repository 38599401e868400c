"""Starting, watching and ending an I/O process; `python -m orchestrator.cache.io.process SPEC` is that process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.shell import IoShell
from orchestrator.cache.store.open import open_store

KEEP_BUFFERS = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""Environment under which glibc keeps freed buffers of a stripe's size. Without it page faults on fresh buffers take
most of the erasure code's time."""


class IoProcess:
    """An I/O process of this machine.

    Args:
        folder: socket, arena and log lie here; a memory file system (/dev/shm) makes the arena shared memory.
        store: what `open_store` takes.
        layout: `BlockLayout.tag`.
        block_bytes: `BlockLayout.block_bytes`.
        slots: blocks of the host tier.
        tied: it ends when the process that started it ends, however that happens, and removes `folder` then.
    """

    def __init__(
        self, folder: Path, store: dict[str, Any], layout: bytes, block_bytes: int, slots: int, *, tied: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket_path, self.arena_path = folder / "io.sock", folder / "arena"
        self._log = folder / "io.log"
        self._spec = {"socket": str(self.socket_path), "arena": str(self.arena_path), "store": store,
                      "layout": layout.hex(), "block_bytes": block_bytes, "slots": slots,
                      "parent": os.getpid() if tied else None}  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 30.0) -> None:
        """Start, or start again what died; the new one takes the arena's blocks over. Raises RuntimeError with the
        process's last words where it does not come up."""
        if self.alive:
            if _answers(self.socket_path):
                return
            self.stop()  # it is dying, or will never listen
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()
        command = [sys.executable, "-m", "orchestrator.cache.io.process", json.dumps(self._spec)]
        with self._log.open("ab") as log:
            environment = {**KEEP_BUFFERS, **os.environ}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + timeout_s
        while not _answers(self.socket_path):
            if not self.alive or time.monotonic() > end:
                self.stop()
                words = self._log.read_text(errors="replace").splitlines()[-3:]
                raise RuntimeError(f"the KV I/O process did not start: {' | '.join(words) or 'it said nothing'}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End it in order; what was accepted is stored first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _answers(path: Path) -> bool:
    """Does a process work behind the socket? A dying one may still take connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(str(path))
            m.send(probe, m.Ask(0))
            return bool(probe.recv(1))
        except OSError:
            return False


def main(spec: dict[str, Any]) -> None:
    layout = bytes.fromhex(spec["layout"])
    arena = HostArena.create(Path(spec["arena"]), layout, spec["slots"], spec["block_bytes"])
    store = open_store(spec["store"], layout)
    gc.freeze()  # the index is large and has nothing to collect
    gc.set_threshold(50_000, 20, 100)
    shell = IoShell(store, arena, Path(spec["socket"]))
    signal.signal(signal.SIGTERM, lambda *_: shell.stop())
    signal.signal(signal.SIGINT, lambda *_: shell.stop())
    parent = spec.get("parent")
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent, shell.stop), daemon=True).start()
    shell.run()
    if parent is not None and os.getppid() != parent:
        shutil.rmtree(Path(spec["socket"]).parent, ignore_errors=True)


def _end_with(parent: int, stop: Callable[[], None]) -> None:
    """Call `stop` when the process that started this one is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
