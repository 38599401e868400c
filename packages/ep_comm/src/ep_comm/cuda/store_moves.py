"""Transfers between processes: the source lends its buffers through the store, the target copies them over the link.

A call's transfers to one rank are one message, and so are those that a rank has taken since it last looked: what a plan
moves costs a few words to the store, not some for each expert.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor

from ep_comm.errors import Broken, PeerTimeout
from ep_comm.results import Transfer

Key = tuple[int, int, int]


class Offer(NamedTuple):
    """A buffer that a source lends: `number` counts its offers."""

    number: int
    lent: Any


class Lent(NamedTuple):
    """Bytes of an allocation: its number at the source, how PyTorch opens it elsewhere, where they lie in it."""

    allocation: int
    handle: Any
    offset: int
    length: int


class Device:
    """How buffers are lent and copied between the GPUs of a host.

    An allocation is shared and opened once, which takes longer than an expert's way over the link; both sides keep it
    until `close`.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._mine: dict[int, tuple[int, Any, torch.Tensor]] = {}  # by address
        self._theirs: dict[tuple[int, int], torch.Tensor] = {}  # by rank and number

    def lend(self, buffer: torch.Tensor) -> Lent:
        storage = buffer.untyped_storage()
        at = storage.data_ptr()
        if at not in self._mine:
            whole = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage)
            self._mine[at] = (len(self._mine), reduce_tensor(whole), whole)
        number, handle, _ = self._mine[at]
        return Lent(number, handle, buffer.data_ptr() - at, buffer.numel())

    def open(self, source: int, lent: Lent) -> torch.Tensor:
        key = (source, lent.allocation)
        if key not in self._theirs:
            make, arguments = lent.handle
            self._theirs[key] = make(*arguments)
        return self._theirs[key][lent.offset : lent.offset + lent.length]

    def close(self) -> None:
        self._theirs.clear()
        self._mine.clear()

    def mark(self, buffer: torch.Tensor) -> torch.cuda.Event:
        """What the buffer's owner has queued so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(buffer.device))
        return event

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        if self._stream is None:
            self._stream = torch.cuda.Stream(to.device)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event


class _Box:
    """Messages from one rank to another, in order. Whoever reads one removes it."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name, self._next = store, name, 0

    def put(self, message: Any) -> None:
        self._store.set(f"{self._name}/{self._next}", pickle.dumps(message))
        self._next += 1

    def take(self) -> Any:
        """The next message, or None."""
        key = f"{self._name}/{self._next}"
        if not self._store.check([key]):
            return None
        message = pickle.loads(self._store.get(key))
        self._store.delete_key(key)
        self._next += 1
        return message


class StoreMoves:
    """One rank's transfers. The store is the group's own: what it holds is trusted.

    under_way: (tag, source, target) of those that have not ended.
    """

    def __init__(self, store: Any, rank: int, device: Device | None = None) -> None:
        self._store, self.rank, self.device = store, rank, device or Device()
        self.under_way: set[Key] = set()
        self._boxes: dict[tuple[str, int, int], _Box] = {}
        self._offered: dict[Key, deque[Offer]] = {}  # to this rank, not taken yet
        self._answers: dict[tuple[Key, int], str] = {}  # of targets, not read yet
        self._numbers = 0

    def offer(self, lent: dict[int, list[tuple[Key, torch.Tensor]]]) -> dict[Key, int]:
        """Lend buffers by target; the number of each offer."""
        made: dict[Key, int] = {}
        for target, entries in lent.items():
            message = []
            for key, buffer in entries:
                self._numbers += 1
                made[key] = self._numbers
                message.append((key, Offer(self._numbers, self.device.lend(buffer))))
            self._box("offer", self.rank, target).put(message)
        return made

    def withdraw(self, key: Key, number: int) -> None:
        self._box("offer", self.rank, key[2]).put([(key, Offer(-number, None))])

    def answer(self, said: dict[int, list[tuple[Key, int, str]]]) -> None:
        """Tell sources what became of their offers."""
        for source, entries in said.items():
            self._box("answer", self.rank, source).put(entries)

    def read(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Take in what these ranks have said."""
        for source in sources:
            while (message := self._box("offer", source, self.rank).take()) is not None:
                for key, offer in message:
                    waiting = self._offered.setdefault(key, deque())
                    if offer.number > 0:
                        waiting.append(offer)
                    else:
                        self._offered[key] = deque(o for o in waiting if o.number != -offer.number)
        for target in targets:
            while (message := self._box("answer", target, self.rank).take()) is not None:
                self._answers |= {(key, number): word for key, number, word in message}

    def take(self, key: Key) -> Offer | None:
        waiting = self._offered.get(key)
        return waiting.popleft() if waiting else None

    def answered(self, key: Key, number: int) -> str | None:
        return self._answers.pop((key, number), None)

    def _box(self, kind: str, of: int, to: int) -> _Box:
        if (kind, of, to) not in self._boxes:
            self._boxes[kind, of, to] = _Box(self._store, f"move/{kind}/{of}/{to}")
        return self._boxes[kind, of, to]


class StoreMoving:
    """One call's transfers. They go on in `done` and `wait`; copies run on the device."""

    def __init__(self, moves: StoreMoves, transfers: Sequence[Transfer], seconds: float) -> None:
        self._moves, self._seconds = moves, seconds
        me, apart = moves.rank, [t for t in transfers if t.source != t.target]
        self._give = {(t.tag, t.source, t.target): t.buffer for t in apart if t.source == me}
        self._want = {(t.tag, t.source, t.target): t.buffer for t in apart if t.source != me}
        self._queued = moves.device.mark(apart[0].buffer) if apart else None
        self._lent: dict[Key, int] = {}
        self._copying: dict[Key, tuple[Offer, Any, Any]] = {}  # offer, its tensor, event
        moves.under_way |= set(self._give) | set(self._want)
        self.done()

    def done(self) -> bool:
        if not (self._give or self._want):
            return True
        moves = self._moves
        assert self._queued is not None
        if self._give and not self._lent and self._queued.query():
            by_target: dict[int, list[tuple[Key, torch.Tensor]]] = {}
            for key, buffer in self._give.items():
                by_target.setdefault(key[2], []).append((key, buffer))
            self._lent = moves.offer(by_target)
        moves.read({key[1] for key in self._want}, {key[2] for key in self._lent})
        self._receive()
        for key, number in list(self._lent.items()):
            word = moves.answered(key, number)
            if word is not None:
                del self._lent[key]
                self._drop(key)
                if word != "taken":
                    raise Broken(f"transfer {key}: {word}")
        return not (self._give or self._want)

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout
        end = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() > end:
                left = [*self._give, *self._want]
                for key, number in self._lent.items():
                    self._moves.withdraw(key, number)
                for _, _, event in self._copying.values():
                    event.synchronize()
                for key in left:
                    self._drop(key)
                me = self._moves.rank
                raise PeerTimeout(me, tuple(sorted({k[1] if k[2] == me else k[2] for k in left})), "move", 0, seconds)
            time.sleep(5e-5)

    def _receive(self) -> None:
        """Begin copies of what is offered, and answer for those that have ended."""
        moves, said, after = self._moves, dict[int, list[tuple[Key, int, str]]](), self._queued
        assert after is not None
        refused = ""
        for key, buffer in list(self._want.items()):
            if key not in self._copying:
                offer = moves.take(key)
                if offer is None:
                    continue
                source = moves.device.open(key[1], offer.lent)
                if source.numel() != buffer.numel():
                    refused = f"transfer {key}: the source has {source.numel()} bytes, the target {buffer.numel()}"
                    said.setdefault(key[1], []).append((key, offer.number, "the target's buffer has another size"))
                    self._drop(key)
                    continue
                self._copying[key] = (offer, source, moves.device.copy(buffer, source, after))
            offer, _, event = self._copying[key]
            if event.query():
                said.setdefault(key[1], []).append((key, offer.number, "taken"))
                self._drop(key)
        moves.answer(said)
        if refused:
            raise Broken(refused)

    def _drop(self, key: Key) -> None:
        for of in (self._give, self._want, self._copying):
            of.pop(key, None)
        self._moves.under_way.discard(key)
