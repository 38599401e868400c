"""Transfers over links: the target asks, a thread of the source sends in pieces."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ep_comm.errors import Broken, CommError, Mismatch, PeerTimeout
from ep_comm.over_groups.links import Links, Message, Type
from ep_comm.results import Transfer

_PIECE = 1 << 20  # bytes: collectives on the same connection wait for one at most
_SLICE = 0.1


class _Side:
    """A transfer of this rank."""

    def __init__(self, transfer: Transfer, nonce: int) -> None:
        self.transfer, self.nonce, self.moved, self.over = transfer, nonce, 0, False
        self.error: CommError | None = None

    def end(self, error: CommError | None = None) -> None:
        self.over, self.error = True, error


class Transfers:
    """Of one rank. `changed` is the mailbox's: peers that leave ring it too."""

    def __init__(self, links: Links, changed: threading.Condition, gone: dict[int, str], rank: int) -> None:
        self._links, self.changed, self._gone, self._rank = links, changed, gone, rank
        self._receiving: dict[int, _Side] = {}  # by nonce
        self._offered: dict[tuple[int, int], _Side] = {}  # by tag and target
        self._wants: dict[tuple[int, int], Message] = {}  # likewise, not served yet
        self._dropped: set[tuple[int, int]] = set()  # (target, nonce) of wants that were dropped while served
        self._nonces = 0
        self._jobs: queue.SimpleQueue[tuple[_Side, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, transfer: Transfer) -> _Side:
        with self.changed:
            self._nonces += 1
            side = _Side(transfer, self._nonces)
            if transfer.source == transfer.target:
                side.end()
            elif transfer.target == self._rank:
                self._receiving[side.nonce] = side
            else:
                self._offered[transfer.tag, transfer.target] = side
                self._match(transfer.tag, transfer.target)
        if transfer.target == self._rank and not side.over:
            self._send(transfer.source, Type.want, transfer.tag, side.nonce, size=transfer.buffer.numel())
        return side

    def receive(self, peer: int, message: Message) -> None:
        """What a peer's link brings."""
        with self.changed:
            if message.type == Type.want:
                self._wants[message.number, peer] = message
                self._match(message.number, peer)
            elif message.type == Type.drop:
                want = self._wants.get((message.number, peer))
                if want is not None and want.detail == message.detail:
                    del self._wants[message.number, peer]
                else:
                    self._dropped.add((peer, message.detail))
            elif (side := self._receiving.get(message.number)) is not None:
                self._take(peer, message, side)
            self.changed.notify_all()

    def give_up(self, side: _Side) -> None:
        t = side.transfer
        with self.changed:
            if self._offered.get((t.tag, t.target)) is side:
                del self._offered[t.tag, t.target]
            waited = self._receiving.pop(side.nonce, None) is side
            side.over = True
        if waited:
            self._send(t.source, Type.drop, t.tag, side.nonce)

    def look(self, side: _Side) -> bool:
        """Whether it is over; a peer that has gone ends it."""
        with self.changed:
            t = side.transfer
            why = self._gone.get(t.target if t.source == self._rank else t.source)
            if why and not side.over:
                self.give_up(side)
                side.error = Broken(f"transfer {t.tag}: {why}")
            return side.over

    def end_all(self, why: str) -> None:
        with self.changed:
            for side in [*self._receiving.values(), *self._offered.values()]:
                side.end(side.error or Broken(why))
            self._receiving.clear()
            self._offered.clear()
            self.changed.notify_all()

    def _take(self, peer: int, message: Message, side: _Side) -> None:
        t, size = side.transfer, message.payload.numel()
        if message.type == Type.refuse:
            text = f"rank {self._rank} expects {t.buffer.numel()} bytes, rank {peer} has {message.detail}"
            side.end(Mismatch(f"transfer {t.tag}: {text}"))
        elif message.detail == side.moved and side.moved + size <= t.buffer.numel():
            t.buffer[side.moved : side.moved + size] = message.payload.to(t.buffer.device)
            side.moved += size
            side.over = side.moved == t.buffer.numel()
        if side.over:
            del self._receiving[side.nonce]

    def _match(self, tag: int, target: int) -> None:
        side, want = self._offered.get((tag, target)), self._wants.get((tag, target))
        if side is None or want is None:
            return
        del self._offered[tag, target], self._wants[tag, target]
        self._jobs.put((side, want.detail))
        size = side.transfer.buffer.numel()
        if want.size != size:
            text = f"rank {target} expects {want.size} bytes, rank {self._rank} has {size}"
            side.end(Mismatch(f"transfer {tag}: {text}"))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            side, nonce = self._jobs.get()
            t = side.transfer
            if isinstance(side.error, Mismatch):
                self._send(t.target, Type.refuse, nonce, t.buffer.numel())
            elif not side.over and self._send_pieces(side, nonce):
                with self.changed:
                    side.over = True
                    self.changed.notify_all()

    def _send_pieces(self, side: _Side, nonce: int) -> bool:
        """Whether all went to a target that still wants them. If it does not, it may ask again."""
        t = side.transfer
        for begin in range(0, max(t.buffer.numel(), 1), _PIECE):
            piece = t.buffer[begin : begin + _PIECE].cpu()
            if side.over or not self._send(t.target, Type.piece, nonce, begin, payload=piece, wait=True):
                return False
            with self.changed:
                if (t.target, nonce) in self._dropped:
                    self._dropped.discard((t.target, nonce))
                    self._offered[t.tag, t.target] = side
                    self._match(t.tag, t.target)
                    return False
        return True

    def _send(self, peer: int, type: Type, number: int, detail: int, **more: Any) -> bool:
        try:
            self._links.send(peer, type, number, detail, **more)
        except RuntimeError:  # the thread that receives from this peer says why
            return False
        return True


class GroupMoving:
    """What one `move` started."""

    def __init__(
        self, transfers: Transfers, started: Sequence[_Side], rank: int, timeout: float, epoch: Callable[[], int]
    ) -> None:
        self._transfers, self._sides, self._rank, self._timeout, self._epoch = (
            transfers,
            list(started),
            rank,
            timeout,
            epoch,
        )
        self._error: CommError | None = None

    def pending(self) -> list[Transfer]:
        over = [(side, self._transfers.look(side)) for side in self._sides]
        for side, ended in over:
            if ended:
                self._error = self._error or side.error
        self._sides = [side for side, ended in over if not ended]
        return [side.transfer for side in self._sides]

    def done(self) -> bool:
        left = self.pending()
        if self._error is not None:
            raise self._error
        return not left

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                peers = {t.target if t.source == self._rank else t.source for t in self.pending()}
                for side in self._sides:
                    self._transfers.give_up(side)
                self._sides = []
                self._error = PeerTimeout(self._rank, tuple(sorted(peers)), "move", self._epoch(), seconds)
                raise self._error
            with self._transfers.changed:
                if not any(side.over for side in self._sides):
                    self._transfers.changed.wait(min(left, _SLICE))
