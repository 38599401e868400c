"""Transfers between processes: the source lends its buffer through the store, the target copies it over the link."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from ep_comm.errors import Broken, PeerTimeout
from ep_comm.results import Transfer

Key = tuple[int, int, int]


class StoreMoves:
    """One rank's transfers. The store is the group's own: what it holds is trusted."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.under_way: set[Key] = set()
        self._times: dict[Key, int] = {}  # a key is used again when its transfer has ended

    def name(self, key: Key) -> str:
        self._times[key] = self._times.get(key, 0) + 1
        return f"move/{'/'.join(map(str, key))}/{self._times[key]}"

    def take_back(self, key: Key) -> None:
        """Of a transfer that nobody met: the next of its key is the same one for the other side."""
        self._times[key] -= 1


class _Source:
    def __init__(self, moves: StoreMoves, transfer: Transfer, name: str) -> None:
        self._moves, self._name, self._lent = moves, name, False
        self._buffer, self._queued = transfer.buffer, torch.cuda.Event()
        self._queued.record(torch.cuda.current_stream(transfer.buffer.device))

    def step(self) -> bool:
        store = self._moves.store
        if not self._lent and self._queued.query():
            store.set(self._name, pickle.dumps(reduce_tensor(self._buffer)))
            self._lent = True
        if not self._lent or not store.check([self._name + "/done"]):
            return False
        refused = store.get(self._name + "/done") != b"ok"
        store.delete_key(self._name)
        store.delete_key(self._name + "/done")
        if refused:
            raise Broken(f"transfer {self._name}: the target's buffer has another size")
        return True

    def take_back(self) -> None:
        if self._lent:
            self._moves.store.delete_key(self._name)


class _Target:
    def __init__(self, moves: StoreMoves, transfer: Transfer, name: str) -> None:
        self._moves, self._name, self._buffer = moves, name, transfer.buffer
        self._queued = torch.cuda.Event()
        self._queued.record(torch.cuda.current_stream(transfer.buffer.device))
        self._stream = torch.cuda.Stream(transfer.buffer.device)
        self._copied: torch.cuda.Event | None = None
        self._lent: torch.Tensor | None = None

    def step(self) -> bool:
        store = self._moves.store
        if self._copied is None:
            if not store.check([self._name]):
                return False
            rebuild: tuple[Callable[..., torch.Tensor], tuple[Any, ...]] = pickle.loads(store.get(self._name))
            self._lent = rebuild[0](*rebuild[1])
            if self._lent.numel() != self._buffer.numel():
                store.set(self._name + "/done", b"refused")
                raise Broken(f"transfer {self._name}: the source's buffer has another size")
            self._stream.wait_event(self._queued)
            with torch.cuda.stream(self._stream):
                self._buffer.copy_(self._lent, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        if not self._copied.query():
            return False
        self._lent = None
        store.set(self._name + "/done", b"ok")
        return True

    def take_back(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._lent = None


class StoreMoving:
    """Goes on in `done` and `wait`: a few words to the store a call, the copy itself runs on the device."""

    def __init__(self, moves: StoreMoves, transfers: Sequence[Transfer], seconds: float) -> None:
        self._moves, self._seconds = moves, seconds
        self._left: dict[Key, _Source | _Target] = {}
        for t in transfers:
            key = (t.tag, t.source, t.target)
            if t.source == t.target:
                continue
            side = _Source if moves.rank == t.source else _Target
            self._left[key] = side(moves, t, moves.name(key))
        moves.under_way |= set(self._left)
        self.done()

    def done(self) -> bool:
        for key in list(self._left):
            if self._left[key].step():
                self._drop(key)
        return not self._left

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout
        end = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() > end:
                missing = {key[1] if key[2] == self._moves.rank else key[2] for key in self._left}
                for key in list(self._left):
                    self._left[key].take_back()
                    self._moves.take_back(key)
                    self._drop(key)
                raise PeerTimeout(self._moves.rank, tuple(sorted(missing)), "move", 0, seconds)
            time.sleep(1e-4)

    def _drop(self, key: Key) -> None:
        del self._left[key]
        self._moves.under_way.discard(key)
