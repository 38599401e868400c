"""The engine's way into the cache.

    client = CacheClient(process.socket_path, process.arena_path, scope)
    plan = client.match(tokens)                          # hit length, nothing moved, nothing renewed
    fetch = client.fetch(plan, deadline_s=0.2, on_done=wake)   # starts at once
    ...                                                  # on_done: fetch.blocks have come, without a gap
    layout.scatter(pools, ids, [fetch.payload(number) for number in range(fetch.blocks)])
    client.use(plan, fetch.blocks); fetch.release()
    new = plan.chain.extend(generated)                   # decode: keys of blocks that became full
    client.insert(plan.chain, first, payloads)           # published once durable

A client never raises because the I/O process is gone: fetches come back with no blocks, inserts as FAILED, matches as
0, and it tries to connect again at later calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from orchestrator.cache.chain import Chain, ChainScope, ImageRun, Tokens, usable_blocks
from orchestrator.cache.handles import FetchHandle, Handle, InsertHandle
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.link import InlineLink, Link, LinkLost, SocketLink
from orchestrator.cache.retention import Retention
from orchestrator.cache.store.base import Store
from orchestrator.cache.watchdog import Watchdog
from orchestrator.model.config import BLOCK_TOKENS

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_LATE_S = 0.1  # after a deadline: the I/O process itself cuts a fetch at it


@dataclass(frozen=True)
class Plan:
    """A prompt's chain and how much of it is there: `blocks` blocks, at most all but the last token."""

    chain: Chain
    blocks: int

    @property
    def hit_tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS

    @property
    def keys(self) -> list[bytes]:
        """Keys of the hit."""
        return self.chain.keys[: self.blocks]


class CacheClient:
    """One engine's connection. Methods may be called from any thread; callbacks come on the link's.

    `match`, `pin` and the first half of `insert` wait for an answer, at most `answer_s` seconds. When none comes, the
    I/O process is left alone for a second, then two, up to thirty: all of them give up at once.
    """

    def __init__(self, socket_path: Path, arena_path: Path, scope: ChainScope, answer_s: float = 0.5) -> None:
        self.scope, self.root, self.answer_s = scope, scope.root(), answer_s
        self._path, self._arena_path = socket_path, arena_path
        self.arena: HostArena | None = None
        self._link: Link | None = None
        self._ids = count(1)
        self._waiting: dict[int, Handle] = {}
        self._lock = threading.RLock()
        self._watchdog = Watchdog()
        self._quiet_until, self._pause_s = float("-inf"), _PAUSE_S
        self._connect()

    @staticmethod
    def inline(store: Store, arena: HostArena, scope: ChainScope) -> CacheClient:
        """A client that does the I/O itself, in its callers' threads."""
        client = CacheClient.__new__(CacheClient)
        client.scope, client.root, client.answer_s = scope, scope.root(), 5.0
        client.arena, client._ids, client._waiting = arena, count(1), {}
        client._lock, client._quiet_until, client._watchdog = threading.RLock(), float("-inf"), Watchdog()
        client._pause_s = _PAUSE_S
        link = InlineLink(store, arena)
        link.on_answer, link.on_lost = client._answered, lambda: None
        client._link = link
        return client

    @property
    def alive(self) -> bool:
        """Is there an I/O process to talk to?"""
        return self._link is not None

    def match(self, tokens: Tokens, images: Sequence[ImageRun] = (), root: bytes | None = None) -> Plan:
        """How many first blocks of a prompt are there. `root` is that of another scope, say another tenant's."""
        chain = Chain(root or self.root, images)
        chain.extend(tokens)
        return Plan(chain, self.there(chain.keys[: usable_blocks(len(tokens))]))

    def there(self, keys: Sequence[bytes]) -> int:
        """How many first keys of a path are there."""
        answer = self._ask(m.Match(next(self._ids), list(keys))) if keys else None
        return answer.blocks if isinstance(answer, m.Matched) else 0

    def find(self, keys: Sequence[bytes]) -> int | None:
        """The first of these keys, of any paths, that is there: its place among them."""
        answer = self._ask(m.Find(next(self._ids), list(keys))) if keys else None
        return answer.number if isinstance(answer, m.Found) and answer.number >= 0 else None

    def retry(self) -> bool:
        """Try to connect now, whatever the pause. Returns `alive`."""
        with self._lock:
            if self._link is None and self._quiet_until < float("inf"):
                self._quiet_until = float("-inf")
                if self._connect():
                    self._pause_s = _PAUSE_S
            return self.alive

    def fetch(
        self, plan: Plan, deadline_s: float, *, first: int = 0, on_done: Callable[[FetchHandle], None] | None = None
    ) -> FetchHandle:
        """Bring the hit's blocks from `first` on (those before are on the device) into host memory.

        `on_done` is called once: when all have come, when no more can come, or `deadline_s` seconds from now. It is
        called from another thread, and without blocks where the I/O process says nothing.
        """
        if not 0 <= first <= plan.blocks:
            raise ValueError(f"first: got {first}, allowed are 0 to {plan.blocks}")
        keys = plan.keys[first:]
        handle = FetchHandle(next(self._ids), keys, self, on_done)
        parent = plan.chain.keys[first - 1] if first else plan.chain.root
        if not keys:
            handle.finish(None)
        else:
            self._start(handle, m.Fetch(handle.id, keys, parent, first, deadline_s))
            if not handle.done:
                self._watchdog.after(deadline_s + _LATE_S, lambda: self._give_up(handle))
        return handle

    def insert(
        self,
        chain: Chain,
        first: int,
        payloads: Sequence[bytes],
        retention: Retention = Retention.AGENT,
        tenant: str = "",
        on_done: Callable[[InsertHandle], None] | None = None,
    ) -> InsertHandle:
        """Publish full blocks `first`, `first + 1`, ... of a chain. The step that wrote their rows must have ended.

        Copies the payloads before it returns. Blocks for which there is no room to wait come back as REFUSED.
        """
        if not 0 <= first <= first + len(payloads) <= len(chain.keys):
            raise ValueError(f"first, payloads: got blocks {first} to {first + len(payloads)}, allowed are full blocks "
                             f"of the chain, 0 to {len(chain.keys)}")  # fmt: skip
        size = self.arena.block_bytes if self.arena is not None else None
        if wrong := [len(payload) for payload in payloads if len(payload) != size and size is not None]:
            raise ValueError(f"payloads: got one of {wrong[0]} bytes, allowed are {size}")
        handle = InsertHandle(next(self._ids), len(payloads), on_done)
        answer = self._ask(m.Reserve(handle.id, len(payloads))) if payloads else None
        slots = answer.slots if isinstance(answer, m.Reserved) else []
        arena, link = self.arena, self._link
        if answer is None and payloads:
            self._tell(m.Commit(handle.id, [], int(retention), tenant))  # an answer that comes late frees its slots
        if not slots or arena is None or link is None:
            handle.finish(answer if not slots else None)
            return handle
        written = []
        for number, (slot, generation) in enumerate(slots, first):
            key, parent = chain.keys[number], chain.keys[number - 1] if number else chain.root
            arena.write(slot, key, parent, number, generation, payloads[number - first])
            written.append(m.Written(slot, generation, key, parent, number))
        self._start(handle, m.Commit(handle.id, written, int(retention), tenant))
        return handle

    def use(self, plan: Plan, blocks: int, retention: Retention = Retention.AGENT) -> None:
        """A hit of so many blocks was adopted: the path's stay is prolonged."""
        if blocks:
            self._tell(m.Use(next(self._ids), plan.chain.keys[:blocks], int(retention)))

    def pin(self, keys: Sequence[bytes], seconds: float) -> int | None:
        """Hold a path (from its first block on) in the store. None where it is not all there, or cannot be held."""
        id = next(self._ids)
        answer = self._ask(m.Pin(id, list(keys), seconds))
        return id if isinstance(answer, m.Pinned) and answer.lease is not None else None

    def unpin(self, pin: int) -> None:
        """End a pin before its time."""
        self._tell(m.Unpin(pin))

    def numbers(self) -> dict[str, float]:
        """Counters of the I/O process; empty without one."""
        answer = self._ask(m.Ask(next(self._ids)))
        return dict(answer.values) if isinstance(answer, m.Numbers) else {}

    def release(self, handle: FetchHandle) -> None:
        """The engine has copied the blocks, or no longer wants them."""
        given_up = self._waiting.pop(handle.id, None)
        self._tell(m.Release(handle.id))
        if given_up is not None:
            handle.finish(None)

    def close(self) -> None:
        self._watchdog.close()
        link, self._link = self._link, None
        self._quiet_until = float("inf")
        if link is not None:
            link.close()
        self._lost()

    def _give_up(self, handle: FetchHandle) -> None:
        if not handle.done:
            self.release(handle)

    def _connect(self) -> bool:
        with self._lock:
            if self._link is not None:
                return True
            link: SocketLink | None = None
            try:
                link = SocketLink(self._path, self._answered, lambda: self._lost(link))
                self.arena = HostArena.attach(self._arena_path)  # whoever listens has made it
            except (OSError, ValueError):
                if link is not None:
                    link.close()
                self._quieten()
                return False
            self._link = link
            link.start()
            return True

    def _quieten(self) -> None:
        """Nobody answers: nothing is asked for a while, longer each time."""
        self._quiet_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _ask(self, message: m.Message) -> m.Message | None:
        handle = Handle(message.id)
        self._start(handle, message)
        if not handle.wait(self.answer_s):
            self._waiting.pop(message.id, None)
            self._quieten()
        return handle.answer

    def _start(self, handle: Handle, message: m.Message) -> None:
        with self._lock:
            self._waiting[handle.id] = handle
        if not self._tell(message):
            self._waiting.pop(handle.id, None)
            handle.finish(None)

    def _tell(self, message: m.Message) -> bool:
        if time.monotonic() < self._quiet_until:
            return False
        link = self._link if self._connect() else None
        if link is None:
            return False
        try:
            link.send(message)
        except LinkLost:
            self._quieten()
            self._lost(link)
            return False
        return True

    def _answered(self, answer: m.Message) -> None:
        if self._quiet_until < float("inf"):
            self._quiet_until, self._pause_s = float("-inf"), _PAUSE_S
        handle = self._waiting.pop(answer.id, None)
        if handle is not None:
            handle.finish(answer)

    def _lost(self, link: Link | None = None) -> None:
        with self._lock:
            if link is not None and self._link is not link:
                return
            self._link = None
            waiting, self._waiting = list(self._waiting.values()), {}
        for handle in waiting:
            handle.finish(None)
