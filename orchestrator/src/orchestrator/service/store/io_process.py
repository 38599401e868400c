"""The I/O process of a machine's workers: `python -m orchestrator.service.store.io_process SPEC`.

Whichever worker finds none starts it (`IoKeeper`). It belongs to none of them: it goes on when its starter is killed,
and ends once it has had no worker for some seconds, so also when all of them were killed. It holds a lock of the
service's folder as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from kernel_core.check import require
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.io.shell import IoShell
from orchestrator.cache.store.open import open_store

LINGER_S = 3.0
ENDING_S = 20.0
"""What was accepted is stored in this time or not at all: a store that hangs must not keep the process."""
_MEMORY = Path("/dev/shm")
_PREFIX = "fathom-store-"


class Places:
    """Where the I/O process of a service on this machine is found.

    Attributes:
        lock, log: in the service's folder.
        home: of socket and arena; in memory where there is a file system in memory, and short, as sockets' paths are.
    """

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()
        self.lock, self.log = folder / "io.lock", folder / "io.log"
        name = _PREFIX + hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        self.home = (_MEMORY if os.access(_MEMORY, os.W_OK) else folder) / name
        self.socket, self.arena, self.service = self.home / "io.sock", self.home / "arena", self.home / "lock"

    def make(self) -> None:
        """Raises OSError, also where the place in memory is somebody else's."""
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(mode=0o700, exist_ok=True)
        seen = self.home.lstat()
        if seen.st_uid != os.getuid() or self.home.is_symlink():
            raise PermissionError(f"{self.home} belongs to another user")
        self.service.write_text(str(self.lock))


def sweep() -> None:
    """Remove what I/O processes left in memory that were killed with all of their workers."""
    for home in _MEMORY.glob(f"{_PREFIX}*") if os.access(_MEMORY, os.W_OK) else ():
        with contextlib.suppress(OSError):
            lock = Path((home / "lock").read_text())
            if not lock.exists():
                shutil.rmtree(home, ignore_errors=True)
                continue
            with lock.open("ab") as file:  # its workers may be about to start another
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)


def main(spec: dict[str, Any]) -> None:
    os.set_inheritable(spec["lock"], False)  # held from here to the end; whoever started this process lets go of it
    places, layout = Places(Path(spec["folder"])), bytes.fromhex(spec["layout"])
    require(places.lock.exists(), "folder", spec["folder"], "the folder of a service")
    sweep()
    places.make()
    arena = HostArena.create(places.arena, layout, spec["slots"], spec["block_bytes"])
    (places.home / "pid").write_text(str(os.getpid()))
    store = open_store(spec["store"], layout)
    gc.freeze()  # the index is large and has nothing to collect
    gc.set_threshold(50_000, 20, 100)
    shell = IoShell(store, arena, places.socket, linger_s=spec["linger_s"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: shell.stop())
    print("kv-io: serves", flush=True)
    shell.run(ending=lambda: _end_in_time(places.home))
    _leave(places.home, 0)


def _end_in_time(home: Path) -> None:
    timer = threading.Timer(ENDING_S, _leave, (home, 3))
    timer.daemon = True
    timer.start()


def _leave(home: Path, status: int) -> None:
    shutil.rmtree(home, ignore_errors=True)  # while the lock is held: nobody has made it anew
    os._exit(status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
