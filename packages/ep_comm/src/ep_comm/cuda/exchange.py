"""Transfers between ranks of one process: whoever comes second copies, on a stream of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_comm.errors import Broken, PeerTimeout
from ep_comm.results import Transfer

Key = tuple[int, int, int]


@dataclass
class _Side:
    buffer: torch.Tensor
    ready: torch.cuda.Event  # what the buffer's owner had queued before


class _Pair:
    """A transfer, from the moment its first side comes."""

    def __init__(self) -> None:
        self.sides: dict[int, _Side] = {}
        self.copied: torch.cuda.Event | None = None


class Exchange:
    """What the ranks of a process have under way with each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._pairs: dict[Key, _Pair] = {}
        self._stream = torch.cuda.Stream(device)
        self.ended = ""

    def add(self, rank: int, transfer: Transfer) -> _Pair:
        key = (transfer.tag, transfer.source, transfer.target)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        with self._lock:
            pair = self._pairs.setdefault(key, _Pair())
            pair.sides[rank] = _Side(transfer.buffer, ready)
            if len(pair.sides) == 2 or transfer.source == transfer.target:
                del self._pairs[key]
                self._copy(pair, transfer)
        return pair

    def forget(self, rank: int, key: Key, pair: _Pair) -> bool:
        """Takes a side back that nobody met; False where the copy has begun."""
        with self._lock:
            if pair.copied is not None:
                return False
            pair.sides.pop(rank, None)
            if not pair.sides and self._pairs.get(key) is pair:
                del self._pairs[key]
            return True

    def _copy(self, pair: _Pair, transfer: Transfer) -> None:
        source, target = pair.sides[transfer.source], pair.sides[transfer.target]
        if source.buffer.numel() != target.buffer.numel():
            sizes = f"{source.buffer.numel()} and {target.buffer.numel()} bytes"
            self.ended = f"transfer {transfer.tag} from {transfer.source} to {transfer.target}: {sizes}"
            return
        for side in (source, target):
            self._stream.wait_event(side.ready)
        with torch.cuda.stream(self._stream):
            target.buffer.copy_(source.buffer, non_blocking=True)
        pair.copied = torch.cuda.Event()
        pair.copied.record(self._stream)


class ExchangeMoving:
    """One rank's transfers of one call."""

    def __init__(self, exchange: Exchange, rank: int, transfers: Sequence[Transfer], seconds: float) -> None:
        self._exchange, self._rank, self._seconds = exchange, rank, seconds
        self._pairs = {(t.tag, t.source, t.target): exchange.add(rank, t) for t in transfers}

    @property
    def keys(self) -> set[Key]:
        """Of what has not ended."""
        return {k for k, p in self._pairs.items() if p.copied is None or not p.copied.query()}

    def done(self) -> bool:
        if not self.keys:
            return True
        if self._exchange.ended:
            raise Broken(self._exchange.ended)
        return False

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout
        end = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() > end:
                late = [k for k in self.keys if self._exchange.forget(self._rank, k, self._pairs[k])]
                for key in late:
                    del self._pairs[key]
                missing = {key[1] if key[2] == self._rank else key[2] for key in late}
                if missing:
                    raise PeerTimeout(self._rank, tuple(sorted(missing)), "move", 0, seconds)
            time.sleep(2e-5)
