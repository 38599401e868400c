"""How full a shared directory is: the process that collects tells those that do not."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import google_crc32c

_USAGE = struct.Struct("<QQ")
_CRC = struct.Struct("<I")


class Usage:
    """A file beside the blocks; its modification time is the collector's turn.

    Args:
        token: names this process's own files.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._path, self._hidden = folder / "usage", folder / f"new-usage-{token}"

    def tell(self, used: int, blocks: int, now: float) -> None:
        """Bytes and blocks that a turn at `now` left. Failures leave others with what they knew."""
        data = _USAGE.pack(used, blocks)
        with contextlib.suppress(OSError):
            self._hidden.write_bytes(data + _CRC.pack(google_crc32c.value(data)))
            os.utime(self._hidden, (now, now))
            self._hidden.rename(self._path)

    def age(self, now: float) -> float:
        """Seconds since the last turn of any process; infinite where none was, or one in the future."""
        try:
            age = now - self._path.stat().st_mtime
        except OSError:
            return float("inf")
        return age if age >= 0 else float("inf")

    def read(self) -> tuple[int, int] | None:
        """(bytes, blocks) of the last turn; None where nobody has told, or not all of it is there."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        if len(data) != _USAGE.size + _CRC.size:
            return None
        told, (crc,) = data[: _USAGE.size], _CRC.unpack(data[_USAGE.size :])
        if crc != google_crc32c.value(told):
            return None
        used, blocks = _USAGE.unpack(told)
        return used, blocks
