"""A store in Mooncake Store: memory of many machines behind one master. Needs `mooncake-transfer-engine`.

What it cannot promise, and what follows:
- It evicts by its own least-recently-used order, so a parent may go before its child. Matching takes leading blocks
  only, and reads verify: a gap makes a hit shorter, never wrong.
- Its presence call grants a lease of seconds: a probe keeps an object from its eviction for that long. Our collector
  removes by force; a reader that comes too late gets a miss.
- A read of a block whose machine is gone fails although its key is there, until the master has noticed: a miss.
- Its objects are in memory: durable against the loss of a client only with replicas, not against the loss of all.
- Expiry by class is kept by the process that wrote a block; after that one's restart Mooncake's eviction rules alone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes, seal, verify
from orchestrator.cache.gc import Collector, FreeBytes, Tick
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import Block, Put, Store, StoreStats

_NO_ROOM = (-200, -201)
_NOT_THERE = -704
_OTHERS_S = 0.2  # that another client has to finish a put of the same key


class MooncakeStore(Store):
    """Blocks of one layout in a Mooncake cluster.

    Args:
        client: a `mooncake.store.MooncakeDistributedStore` that is set up; see `connect`.
        capacity: bytes that this process may keep there.
    """

    def __init__(self, client: Any, layout: bytes, capacity: int, policy: RetentionPolicy | None = None) -> None:
        self.layout, self.capacity, self._client = layout, capacity, client
        self.index = BlockIndex(policy)
        self._collector = Collector(self.index, capacity)
        self._misses: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._refused: list[bytes] = []
        self._prefix = f"fathom/{layout.hex()[:16]}/"

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        return [found == 1 for found in self._client.batch_is_exist([self._name(key) for key in keys])]

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        data = self._client.get_batch([self._name(key) for key in keys])
        if len(data) != len(keys):  # the whole batch failed
            data = [self._client.get(self._name(key)) for key in keys]
        return [self._checked(key, value) for key, value in zip(keys, data, strict=True)]

    def write(self, blocks: Sequence[Block], now: float) -> list[Put]:
        with self._lock:
            return [self._write(block, now) for block in blocks]

    def use(self, keys: Sequence[bytes], now: float, retention: Retention) -> None:
        with self._lock:
            self.index.use(keys, now, retention)

    def collect(self, now: float) -> int:
        with self._lock:
            before = len(self.index)
            names, self._refused = self._refused, []
            for action in self._collector.step(Tick(), now):
                if isinstance(action, FreeBytes):
                    names += [key for key, _, _ in action.places if self.index.get(key) is None]
                else:
                    names += [entry.key for entry in action.entries]
            for key in names:  # by force: probes renew Mooncake's leases, and would keep a block for ever
                if self._client.remove(self._name(key), True) not in (0, _NOT_THERE):
                    self._refused.append(key)
            return before - len(self.index)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(len(self.index), self.index.used, self.capacity, dict(self._misses))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _write(self, block: Block, now: float) -> Put:
        name = self._name(block.key)
        there = self._client.batch_is_exist([name, self._name(block.parent)] if block.depth else [name])
        if there[0] == 1:
            return Put.ALREADY
        if block.depth and there[1] != 1:
            return Put.NO_PARENT
        size = HEADER_BYTES + len(block.payload)
        if self.index.used + size > self.capacity:
            return Put.FULL
        header = seal(self.layout, block.key, block.parent, block.depth, 0, block.payload)
        code = self._client.put(name, header + block.payload)
        if code:
            return Put.FULL if code in _NO_ROOM else Put.FAILED
        if not self._appeared(name):
            return Put.FAILED
        if self.index.get(block.key) is not None:  # it was evicted there, and is back
            self.index.use([block.key], now, block.retention)
            return Put.STORED
        above = self.index.get(block.parent)
        root = block.parent if above is None else b""
        self.index.publish(block.key, block.parent, size, now, block.retention, root=root, tenant=block.tenant)
        return Put.STORED

    def _appeared(self, name: str) -> bool:
        """`put` says 0 also where another client has begun to put the key, which may come to nothing: the master
        forgets the half of one that died after 30 s."""
        until = time.monotonic() + _OTHERS_S
        while self._client.is_exist(name) != 1:
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        return True

    def _checked(self, key: bytes, data: bytes) -> bytes | None:
        reason = "absent"
        if data:
            try:
                return verify(data, self.layout, key)
            except WrongBytes as wrong:
                reason = wrong.reason
                self._client.remove(self._name(key), True)
        self._misses[reason] += 1
        return None

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()


def connect(
    master: str, metadata: str, host: str = "127.0.0.1", segment_bytes: int = 256 << 20, buffer_bytes: int = 64 << 20,
    protocol: str = "tcp", make: Callable[[], Any] | None = None,
) -> Any:  # fmt: skip
    """A client of a running cluster that lends it `segment_bytes` of this machine's memory.

    Raises ImportError where the wheel cannot be loaded, ConnectionError where no master answers.
    """
    if make is None:
        from mooncake.store import MooncakeDistributedStore

        make = MooncakeDistributedStore
    client = make()
    code = client.setup(host, metadata, segment_bytes, buffer_bytes, protocol, "", master)
    if code:
        raise ConnectionError(f"Mooncake master at {master}: setup gave {code}")
    return client
