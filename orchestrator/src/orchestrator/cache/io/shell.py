"""The I/O process's loop: sockets of engines on one side, threads that read and write the store on the other."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.host.table import HostTable
from orchestrator.cache.io import events as ev
from orchestrator.cache.io import jobs
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.core import IoCore
from orchestrator.cache.store.base import Store

_MAX_UNREAD = 16 << 20


class _Engine:
    def __init__(self, number: int, link: socket.socket) -> None:
        self.number, self.link = number, link
        self.inbox = m.Inbox(answers=False)
        self.out = bytearray()


class IoShell:
    """Serves engines over a Unix socket until `stop`. Loads and stores have threads of their own."""

    def __init__(
        self, store: Store, arena: HostArena, path: Path, *, loaders: int = 4, max_filling: int | None = None,
        collect_s: float = 5.0, linger_s: float | None = None,
    ) -> None:  # fmt: skip
        """With `linger_s`, `run` ends once it has had no engine for so many seconds."""
        self.store, self.arena, self.collect_s, self.linger_s = store, arena, collect_s, linger_s
        table = HostTable(arena.slots)
        table.adopt((slot, header.key, header.generation) for slot, header in arena.survey())
        self.core = IoCore(table, max_filling or max(1, arena.slots // 4))
        self._calls = jobs.StoreCalls(store)
        self._engines: dict[int, _Engine] = {}
        self._numbers = count(1)
        self._events: deque[ev.Event | ev.Send] = deque()
        self._loads = ThreadPoolExecutor(loaders, "load")
        self._stores = ThreadPoolExecutor(1, "store")
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stopping = False
        self._path, self._alone_since = path, time.monotonic()

    def stop(self) -> None:
        """End `run` soon. Safe in a signal handler."""
        self._stopping = True
        os.write(self._wake_write, b"x")

    def run(self, ending: Callable[[], None] = lambda: None) -> None:
        """`ending` is called when nobody is served any more, and what was accepted is still to be stored."""
        collected = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            alone_until = self._alone_until()
            if now >= alone_until:
                break
            if now - collected >= self.collect_s:
                collected = now
                self._stores.submit(self._quiet, lambda: self.store.collect(time.time()))
            deadline = self.core.next_deadline()
            until = min(collected + self.collect_s, alone_until, *([] if deadline is None else [deadline]))
            for key, events in self._selector.select(max(0.0, until - now)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._serve(key.data, events)
            self._handle()
        ending()
        self._refuse()
        self._loads.shutdown()
        self._stores.shutdown()
        self.store.close()

    def _alone_until(self) -> float:
        return float("inf") if self.linger_s is None or self._engines else self._alone_since + self.linger_s

    def _refuse(self) -> None:
        """Let nobody connect to a process that will not answer."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _handle(self) -> None:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, ev.Send):
                self._send(event)
            else:
                self._do(event)
        self._do(ev.Tick())

    def _do(self, event: ev.Event) -> None:
        for action in self.core.step(event, time.monotonic()):
            match action:
                case ev.Send():
                    self._send(action)
                case ev.Load():
                    for items in jobs.runs(action):
                        self._submit(self._loads, partial(jobs.load_blocks, self.store, self.arena, items))
                case ev.Probe():
                    self._submit(self._loads, partial(jobs.probe, self.store, action))
                case ev.Persist():
                    self._submit(self._stores, partial(jobs.persist, self.store, self.arena, action))
                case ev.StoreCall():
                    self._submit(self._stores, partial(self._calls.do, action))

    def _submit(self, pool: ThreadPoolExecutor, job: Callable[[], ev.Event | list[ev.Loaded] | list[ev.Send]]) -> None:
        def run() -> None:
            done = job()
            self._events.extend(done if isinstance(done, list) else [done])
            os.write(self._wake_write, b"x")

        pool.submit(self._quiet, run)

    def _quiet(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:
            print(f"kv-io: {type(error).__name__}: {error}", flush=True)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.setblocking(False)
        engine = _Engine(next(self._numbers), link)
        self._engines[engine.number] = engine
        self._selector.register(link, selectors.EVENT_READ, engine)

    def _serve(self, engine: _Engine, events: int) -> None:
        if engine.number not in self._engines:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(engine)
            if events & selectors.EVENT_READ:
                data = engine.link.recv(1 << 20)
                if not data:
                    raise ConnectionError
                for message in engine.inbox.feed(data):
                    self._do(ev.Got(engine.number, message))
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:  # gone, or not one of ours: it is cut off, the others go on
            if isinstance(error, ValueError):
                print(f"kv-io: an engine was cut off: {error}", flush=True)
            self._drop(engine)

    def _send(self, action: ev.Send) -> None:
        engine = self._engines.get(action.client)
        if engine is None:
            return
        engine.out += m.frame(action.message)
        try:
            self._flush(engine)
        except OSError:
            self._drop(engine)
        if len(engine.out) > _MAX_UNREAD:
            self._drop(engine)

    def _flush(self, engine: _Engine) -> None:
        with contextlib.suppress(BlockingIOError):
            while engine.out:
                del engine.out[: engine.link.send(engine.out)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if engine.out else 0)
        self._selector.modify(engine.link, wanted, engine)

    def _drop(self, engine: _Engine) -> None:
        if self._engines.pop(engine.number, None) is None:
            return
        self._selector.unregister(engine.link)
        engine.link.close()
        self._alone_since = time.monotonic()
        self._do(ev.Left(engine.number))
        self._stores.submit(self._quiet, lambda: self._calls.left(engine.number))
