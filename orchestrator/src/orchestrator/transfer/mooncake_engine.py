"""Mooncake's transfer engine: one for a process, whose calls never wait longer than they are told to.

What the library does, found by trying version 0.3.13:

- Its waiting calls spin, for 30 s where the other process is stopped. So a read is begun, then asked for.
- The first call for a name asks the other engine about itself under a lock of all calls, for 61 s where nobody answers.
- What it was told it keeps for good, also when another process has that name now. Only another engine forgets.
- A read that has begun cannot be called off. Its memory belongs to it until it ends, by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.transfer.chunks import Chunk, Chunks
from orchestrator.transfer.errors import TransferUnavailable

PROTOCOLS = ("tcp", "rdma")
_MISSING = (
    "Mooncake's transfer engine cannot be loaded ({error}). It is the package mooncake-transfer-engine-non-cuda "
    "(mooncake-transfer-engine where there is CUDA), and needs the library libibverbs.so.1: libibverbs1 on Debian"
)
_STARTING = threading.Lock()


def load() -> Any:
    """Mooncake's module. Raises TransferUnavailable, which says what is missing."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # Its own end of a read that makes no progress: until then the read keeps its memory.
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "5")
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", "5")
    try:
        return importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        raise TransferUnavailable(_MISSING.format(error=error)) from error


class Engine:
    """A started engine; `name` is where others reach it, `life` tells it from a later one of that name."""

    def __init__(self, host: str, protocol: str, devices: str, memory: tuple[Chunks, ...]) -> None:
        library = load()
        self.life = secrets.token_bytes(8)
        self.using = threading.Lock()
        self.lives: dict[str, bytes] = {}
        self.engine = library.TransferEngine()
        with _STARTING, _only_tcp(protocol):
            if self.engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
                raise OSError(f"Mooncake's transfer engine does not start for {host!r} over {protocol}")
        self.name = f"{host}:{self.engine.get_rpc_port()}"
        for chunks in memory:
            if self.engine.register_memory(chunks.address, chunks.bytes):
                raise OSError(f"Mooncake's transfer engine cannot register {chunks.bytes} bytes")


@dataclass(frozen=True, eq=False)
class Read:
    """One that has begun; the chunk is its own until it ends."""

    engine: Engine
    batch: int
    chunk: Chunk
    name: str

    def state(self) -> int:
        """1 for done, -1 for failed, and then it must not be asked again; 0 else."""
        state = self.engine.engine.transfer_check_status(self.batch)
        return int(state) if state in (1, -1) else 0


@contextlib.contextmanager
def _only_tcp(protocol: str) -> Iterator[None]:
    """An engine takes the network cards that it finds, unless the environment forbids it."""
    before = os.environ.get("MC_FORCE_TCP")
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    try:
        yield
    finally:
        if protocol == "tcp" and before is None:
            del os.environ["MC_FORCE_TCP"]
