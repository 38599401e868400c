"""One writer a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderLock:
    """Held until `close` or the end of the process. Raises RuntimeError where another holds it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise RuntimeError(
                f"{folder} is written by another process; a store of this kind has one writer"
            ) from error

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
