"""Ranks as threads of one process over the reference of ep_comm: what a transport has to do, at its plainest."""

from __future__ import annotations

import threading

import torch

from ep_comm import Broken, Communicator, PeerTimeout, arguments, reference


class Meeting:
    """A place where all ranks leave something and take what all left."""

    def __init__(self, ranks, timeout):
        self.ranks, self.timeout = ranks, timeout
        self.lock = threading.Condition()
        self.left, self.ended = {}, ""
        self.transfers = {}

    def exchange(self, rank, kind, epoch, value):
        with self.lock:
            if self.ended:
                raise Broken(self.ended)
            here = self.left.setdefault(epoch, {})
            here[rank] = (kind, value)
            self.lock.notify_all()
            self.lock.wait_for(lambda: len(here) == self.ranks or self.ended, self.timeout)
            if self.ended and len(here) < self.ranks:
                raise Broken(self.ended)
            if len(here) < self.ranks:
                missing = tuple(r for r in range(self.ranks) if r not in here)
                self.ended = f"rank {rank} timed out in {kind}"
                self.lock.notify_all()
                raise PeerTimeout(rank, missing, kind, epoch, self.timeout)
            assert {k for k, _ in here.values()} == {kind}, here
            self.left.pop(epoch - 2, None)
            return [here[r][1] for r in range(self.ranks)]


class _Moving:
    def __init__(self, waiting):
        self.waiting = waiting

    def done(self):
        return all(e.is_set() for e in self.waiting)

    def wait(self, timeout=None):
        for e in self.waiting:
            assert e.wait(timeout or 5)


class Plain(Communicator):
    def __init__(self, meeting, rank, shape):
        self.meeting, self.rank, self.shape, self.timeout, self.epoch = meeting, rank, shape, meeting.timeout, 0

    def _meet(self, kind, value):
        self.epoch += 1
        return self.meeting.exchange(self.rank, kind, self.epoch, value)

    def dispatch(self, x, ids, weights, *, fixed=False):
        arguments.check_dispatch(self.shape, x, ids, weights)
        got = self._meet("dispatch", (x.clone(), ids.clone(), weights.clone()))
        xs, all_ids, ws = (list(t) for t in zip(*got, strict=True))
        self._ids = all_ids
        return reference.dispatch(self.shape, xs, all_ids, ws, fixed=fixed, epoch=self.epoch)[self.rank]

    def combine(self, y, dispatched, *, out=None):
        got = self._meet("combine", (y.clone(), dispatched))
        return reference.combine(self.shape, [g[0] for g in got], [g[1] for g in got], self._ids)[self.rank]

    def barrier(self):
        self._meet("barrier", None)

    def all_gather(self, row):
        arguments.check_row(row)
        return torch.stack(self._meet("all_gather", row.clone()))

    def move(self, transfers):
        events = []
        with self.meeting.lock:
            for t in transfers:
                key = (t.tag, t.source, t.target)
                side = 0 if t.source == self.rank else 1
                pair = self.meeting.transfers.setdefault(key, [None, None, threading.Event()])
                pair[side] = t.buffer
                events.append(pair[2])
                if pair[0] is not None and pair[1] is not None:
                    pair[1].copy_(pair[0])
                    pair[2].set()
                    del self.meeting.transfers[key]
        return _Moving(events)

    def abort(self, reason):
        with self.meeting.lock:
            self.meeting.ended = self.meeting.ended or f"rank {self.rank} aborted: {reason}"
            self.meeting.lock.notify_all()

    def close(self):
        self.abort("closed")


def reference_threads(shape, timeout=5.0):
    meeting = Meeting(shape.ranks, timeout)
    return [Plain(meeting, r, shape) for r in range(shape.ranks)]
