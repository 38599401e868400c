"""Messages between each two ranks of a group: a header of int64, then bytes. One thread a peer receives them.

A thread, and no time-out on what it receives, since Gloo closes all connections of a group when one wait runs out;
so whoever waits does so on a condition of this process, and can say which ranks are missing.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

_FOREVER = timedelta(days=3650)
_KEPT = 256  # messages to a peer that may be on their way
_TAGS = 1 << 20  # of these messages: far from what others use on the group


class Type(IntEnum):
    part = 1  # of a collective: number = epoch, detail = stamp
    want = 2  # of a transfer's bytes: number = tag, detail = nonce, size = bytes expected
    piece = 3  # of a transfer: number = nonce, detail = offset
    refuse = 4  # of a want: number = nonce, detail = bytes there
    drop = 5  # a want that is no more: number = tag, detail = nonce
    abort = 6  # number: whether it is a mismatch; payload: the reason
    bye = 7


class Message(NamedTuple):
    type: int
    number: int
    detail: int
    size: int
    payload: torch.Tensor


Receive = Callable[[int, Message], None]
Gone = Callable[[int, str], None]


def reason(peer: int, error: Exception) -> str:
    """Why a peer is gone, from an error of torch.distributed, whose texts begin with a place in its sources."""
    text = re.sub(r"^\[[^]]*\] ", "", str(error).split("\n")[0])
    return f"rank {peer} is gone: {text.split('. ')[0] or type(error).__name__}"


class Links:
    """Of one communicator; `channel` is its number on the group, so that messages of two do not meet."""

    def __init__(self, group: dist.ProcessGroup | None, channel: int, receive: Receive, gone: Gone) -> None:
        self._group, self._tag = group, _TAGS + 2 * channel
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._receive, self._gone = receive, gone
        self._locks = [threading.Lock() for _ in range(self.ranks)]
        self._works: list[deque[tuple[dist.Work, torch.Tensor]]] = [deque() for _ in range(self.ranks)]
        self._left = [False] * self.ranks  # to whom this rank has said goodbye
        self._threads = [
            threading.Thread(target=self._run, args=(peer,), daemon=True)
            for peer in range(self.ranks)
            if peer != self.rank
        ]
        for thread in self._threads:
            thread.start()

    def send(
        self,
        peer: int,
        type: Type,
        number: int = 0,
        detail: int = 0,
        *,
        size: int | None = None,
        payload: torch.Tensor | None = None,
        wait: bool = False,
    ) -> None:
        """Queue a message, or see it off with `wait`. `payload` must not change before it has gone."""
        data = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        header = torch.tensor([type, number, detail, data.numel() if size is None else size, data.numel()])
        with self._locks[peer]:
            if self._left[peer]:
                return
            self._left[peer] = type == Type.bye
            sent = [(self._isend(header, peer, 0), header)]
            if data.numel():
                sent.append((self._isend(data, peer, 1), data))
            if not wait:
                # Gloo's works know that they are over only when waited for, so old ones are. They have gone long ago:
                # a peer takes messages in order, and is never more than an epoch behind.
                self._works[peer].extend(sent)
                sent = [self._works[peer].popleft() for _ in range(max(0, len(self._works[peer]) - _KEPT))]
        for work, _ in sent:
            work.wait(_FOREVER)

    def close(self, seconds: float) -> None:
        """Say goodbye and wait for the peers' own, `seconds` at most: no thread is then left in the group."""
        deadline = time.monotonic() + seconds
        self.tell_all(Type.bye)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.flush(max(0.0, deadline - time.monotonic()))

    def flush(self, seconds: float) -> None:
        """Wait, `seconds` at most, until what was sent has gone. Threads wait, since Gloo's waits cannot end early."""
        deadline = time.monotonic() + seconds
        waiting = [threading.Thread(target=self._see_off, args=(peer,), daemon=True) for peer in range(self.ranks)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _see_off(self, peer: int) -> None:
        while True:
            with self._locks[peer]:
                if not self._works[peer]:
                    return
                work, _ = pair = self._works[peer].popleft()
            try:
                work.wait(_FOREVER)
            except RuntimeError:
                return  # the thread that receives from this peer says why
            del pair

    def tell_all(self, type: Type, number: int = 0, payload: torch.Tensor | None = None) -> None:
        """To all peers that can be reached."""
        for peer in range(self.ranks):
            if peer != self.rank:
                self._try(peer, type, number, payload)

    def _try(self, peer: int, type: Type, number: int = 0, payload: torch.Tensor | None = None) -> None:
        try:
            self.send(peer, type, number, payload=payload)
        except RuntimeError as error:
            self._gone(peer, reason(peer, error))

    def _isend(self, data: torch.Tensor, peer: int, part: int) -> dist.Work:
        work = dist.isend(data, group=self._group, tag=self._tag + part, group_dst=peer)
        assert work is not None  # only where this process is not of the group
        return work

    def _take(self, data: torch.Tensor, peer: int, part: int) -> None:
        work = dist.irecv(data, group=self._group, tag=self._tag + part, group_src=peer)
        assert work is not None
        work.wait(_FOREVER)

    def _run(self, peer: int) -> None:
        try:
            while True:
                header = torch.empty(5, dtype=torch.int64)
                self._take(header, peer, 0)
                type, number, detail, size, present = header.tolist()
                payload = torch.empty(present, dtype=torch.uint8)
                if present:
                    self._take(payload, peer, 1)
                self._receive(peer, Message(type, number, detail, size, payload))
                if type == Type.bye:
                    self._try(peer, Type.bye)
                    return
        except Exception as error:  # whatever it is, nobody may wait for this peer
            self._gone(peer, reason(peer, error))
