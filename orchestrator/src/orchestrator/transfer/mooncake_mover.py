"""The process's own memory for Mooncake's links, and reads into it that never wait longer than they are told to."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter

from orchestrator.transfer.chunks import Chunk, Chunks
from orchestrator.transfer.errors import LinkBroken, require
from orchestrator.transfer.mooncake_engine import PROTOCOLS, Engine, Read, load

CHUNK_BYTES, CHUNKS = 1 << 20, 16
_SHORT, _LONG = 50e-6, 1e-3  # seconds between two looks at a read
_RETIRED = 16  # engines that are kept: to end one takes a second, in which no other thread runs
_NONE = (0, (1 << 64) - 1)  # what stands for no batch


class Mover:
    """Reads other processes' chunks into chunks of this one.

    Args:
        host: by which other machines reach this one. protocol: "tcp" or "rdma". devices: names of network cards,
            separated by commas; empty for all.

    Attributes:
        staging: what others read. landing: what is read into.
    """

    def __init__(
        self, host: str, protocol: str = "tcp", devices: str = "", *, chunk: int = CHUNK_BYTES, chunks: int = CHUNKS
    ) -> None:
        require(protocol in PROTOCOLS, "protocol", repr(protocol), " or ".join(PROTOCOLS))
        require(host not in ("", "0.0.0.0") and ":" not in host, "host", repr(host), "a name or IPv4 address to dial")
        load()
        self._about = host, protocol, devices
        self.staging, self.landing = Chunks(chunk, chunks), Chunks(chunk, chunks)
        self._lock = threading.Lock()
        self._left: list[Read] = []
        self._reading = Counter[str]()
        self._most = chunks // 2
        self._retired: list[Engine] = []  # others may read through them still
        self.engine = self._start()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # its threads may use memory until the process has ended

    def _start(self) -> Engine:
        return Engine(*self._about, (self.staging, self.landing))

    def read(self, name: str, life: bytes, address: int, into: memoryview, timeout: float) -> None:
        """Copy `len(into)` bytes, a chunk at most, from the engine called `name`. Raises LinkBroken, by then."""
        until = time.monotonic() + timeout
        chunk = self._land(name, until)
        read = self._begin(name, life, address, chunk, len(into), until)
        state = self._wait(read, until)
        if not state:
            with self._lock:
                self._left.append(read)
            raise LinkBroken(f"{len(into)} bytes of {name} have not come within {timeout} s")
        if state == 1:
            into[:] = chunk.view[: len(into)]
        self._give(chunk, name)
        if state != 1:
            raise LinkBroken(f"{name} could not be read")

    def _land(self, name: str, until: float) -> Chunk:
        """A chunk to read into. One peer that answers nothing does not get all of them."""
        while True:
            self._sweep()
            with self._lock:
                allowed = self._reading[name] < self._most
                self._reading[name] += allowed
            chunk = self.landing.take(min(0.05, max(0.0, until - time.monotonic()))) if allowed else None
            if chunk is not None:
                return chunk
            if allowed:
                self._count(name)
            if time.monotonic() >= until:
                raise LinkBroken("no registered memory is free for what comes")
            if not allowed:
                time.sleep(0.005)

    def _begin(self, name: str, life: bytes, address: int, chunk: Chunk, size: int, until: float) -> Read:
        """Takes over the chunk. The first call for a name is made by a thread that can be left behind."""
        engine = self._knowing(name, life)
        if name in engine.lives:
            read = self._submit(engine, name, address, chunk, size, until)
        else:
            done, reads, waits = threading.Event(), list[Read | None](), True

            def first() -> None:
                read = self._submit(engine, name, address, chunk, size, until)
                with self._lock:
                    if waits:
                        reads.append(read)
                    elif read is not None:
                        self._left.append(read)
                done.set()

            threading.Thread(target=first, name="transfer first call", daemon=True).start()
            done.wait(max(0.0, until - time.monotonic()))
            with self._lock:
                waits = False
            if not reads:
                self._replace(engine)
                raise LinkBroken(f"{name} does not answer; other transfers go on with another engine")
            read = reads[0]
            if read is not None:
                engine.lives[name] = life
        if read is None:
            raise LinkBroken(f"{name} cannot be reached")
        return read

    def _knowing(self, name: str, life: bytes) -> Engine:
        """An engine that has not heard of another life of that name."""
        engine = self.engine
        if engine.lives.get(name, life) != life:
            self._replace(engine)
        return self.engine

    def _replace(self, engine: Engine) -> None:
        with self._lock:
            if self.engine is engine:
                self.engine = self._start()
                self._retired = [*self._retired[1 - _RETIRED :], engine]

    def _submit(self, engine: Engine, name: str, address: int, chunk: Chunk, size: int, until: float) -> Read | None:
        """None, with the chunk given back, if it could not begin."""
        batch = 0
        try:
            if engine.using.acquire(timeout=max(0.0, until - time.monotonic())):
                try:
                    batch = engine.engine.batch_transfer_async_read(name, [chunk.address], [address], [size])
                finally:
                    engine.using.release()
        finally:
            if batch in _NONE:
                self._give(chunk, name)
        return None if batch in _NONE else Read(engine, batch, chunk, name)

    def _wait(self, read: Read, until: float) -> int:
        """1 for a read that is done, -1 for one that has failed, 0 for one that goes on."""
        pause = _SHORT
        while not (state := read.state()) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(_LONG, pause * 1.5)
        return state

    def _sweep(self) -> None:
        """Memory of reads that nobody waited for comes back once they end."""
        with self._lock:
            left, self._left = self._left, []
            ended = [read for read in left if read.state()]
            self._left = [read for read in left if read not in ended]
        for read in ended:
            self._give(read.chunk, read.name)

    def _give(self, chunk: Chunk, name: str) -> None:
        self._count(name)
        self.landing.give(chunk)

    def _count(self, name: str) -> None:
        with self._lock:
            self._reading[name] -= 1
            if not self._reading[name]:
                del self._reading[name]


_MOVERS: dict[tuple[str, str, str], Mover] = {}
_MAKING = threading.Lock()


def mover_of(host: str, protocol: str = "tcp", devices: str = "") -> Mover:
    """The process's own; made when it is first asked for."""
    with _MAKING:
        key = host, protocol, devices
        if key not in _MOVERS:
            _MOVERS[key] = Mover(host, protocol, devices)
        return _MOVERS[key]


def _forget() -> None:
    """A child of a fork has none of the engine's threads."""
    global _MAKING
    _MAKING = threading.Lock()
    _FORKED.append(dict(_MOVERS))
    _MOVERS.clear()


_FORKED: list[dict[tuple[str, str, str], Mover]] = []  # not freed: that would wait for those threads
os.register_at_fork(after_in_child=_forget)
