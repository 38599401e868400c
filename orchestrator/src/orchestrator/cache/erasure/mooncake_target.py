"""A Mooncake cluster as one of the targets."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

from orchestrator.cache.erasure.targets import Target


class MooncakeTarget(Target):
    """Shards in Mooncake Store; `client` is what `store.mooncake.connect` gives.

    Mooncake may evict a shard whenever it wants: reads find out, and repair makes it again. It cannot list names, so
    scans for orphans leave it out.
    """

    def __init__(self, client: Any, name: str, domain: str | None = None) -> None:
        self._client, self.name, self.domain = client, name, domain or name

    def put(self, name: str, data: bytes) -> None:
        self._client.remove(self._name(name), True)  # a put onto a name that is taken changes nothing
        code = self._client.put(self._name(name), data)
        if code:
            raise OSError(errno.ENOSPC if code == -200 else errno.EIO, f"Mooncake gave {code}")

    def get(self, name: str) -> bytes | None:
        data = self._client.get(self._name(name))
        if data:
            return bytes(data)
        if self._client.is_exist(self._name(name)):  # 1: it is there and could not be read, below 0: no answer
            raise OSError(errno.EIO, "Mooncake does not answer")
        return None

    def delete(self, name: str) -> None:
        self._client.remove(self._name(name), True)

    def names(self) -> Iterator[tuple[str, float]]:
        raise OSError(errno.EOPNOTSUPP, "Mooncake cannot list names")

    def _name(self, name: str) -> str:
        return f"fathom/shard/{self.name}/{name}"
