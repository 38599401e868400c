"""A folder for files that a group's processes share as memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile

from orchestrator.cluster.workers import links_folder

PREFIX = "fathom-role-"


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """Locked while its process lives, so that what processes left behind that were killed can be removed by others."""

    def __init__(self) -> None:
        _sweep()
        while True:
            super().__init__(prefix=PREFIX, dir=links_folder())
            self._lock = os.open(self.name, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.isdir(self.name):
                return
            os.close(self._lock)  # it was taken for one of those, before it was locked

    def cleanup(self) -> None:
        super().cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep() -> None:
    for old in links_folder().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, locked, or gone by now
            lock = os.open(old, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old)
            finally:
                os.close(lock)
