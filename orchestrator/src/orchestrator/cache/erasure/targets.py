"""Where shards lie: anything that keeps bytes under a name."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator.cache.store.segments import sync_folder


class Target(abc.ABC):
    """One of the places that a stripe is spread over. Calls come from several threads.

    Attributes:
        name: never changes; placement goes by it.
        domain: targets of one domain fail together.
    """

    name: str
    domain: str

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Durable when it returns; what stood under the name is replaced whole. Raises OSError."""

    @abc.abstractmethod
    def get(self, name: str) -> bytes | None:
        """None where there is nothing under the name. Raises OSError where the target does not answer."""

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Fine where there is nothing. Raises OSError."""

    def expect(self, known: bool) -> bool:
        """Called once before use. `known`: shards were put here in an earlier life. Returns whether it is there."""
        return True

    @abc.abstractmethod
    def names(self) -> Iterator[tuple[str, float]]:
        """All names with the time (`time.time`) they were written. Raises OSError."""


class DirectoryTarget(Target):
    """A directory: local disk, NFS or 3FS mount.

    A marker file says that the directory is the target. Where it is missing, the mount is not there and an empty mount
    point is: the target counts as dead, neither as empty nor as a place to write.
    """

    def __init__(self, folder: Path, name: str | None = None, domain: str | None = None) -> None:
        self.folder = folder
        self.name = name or folder.name
        self.domain = domain or self.name
        self._marker = folder / "fathom-target"

    def expect(self, known: bool) -> bool:
        if not known and not self._marker.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._marker.write_text(self.name + "\n")
            sync_folder(self.folder)
        return self._marker.exists()

    def put(self, name: str, data: bytes) -> None:
        self._there()
        path = self._path(name)
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir()
        temporary = path.with_suffix(".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fdatasync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        sync_folder(path.parent)

    def get(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            self._there()
            return None

    def delete(self, name: str) -> None:
        self._there()
        self._path(name).unlink(missing_ok=True)

    def names(self) -> Iterator[tuple[str, float]]:
        self._there()
        for folder in self.folder.iterdir():
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.suffix != ".new":
                    yield path.name, path.stat().st_mtime

    def _there(self) -> None:
        if not self._marker.exists():
            raise FileNotFoundError(f"{self.folder} is not mounted, or not a target")

    def _path(self, name: str) -> Path:
        return self.folder / name[12:14] / name
