"""Senders and receivers over each kind of link, and links that a test breaks."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import threading
import time

import pytest

from orchestrator import transfer
from orchestrator.transfer import Limits, LocalListener, Receiver, Sender, SharedListener, TcpListener, Times
from orchestrator.transfer.errors import LinkBroken, TransferUnavailable
from orchestrator.transfer.mooncake_engine import load
from orchestrator.transfer.shared import dial_shared
from orchestrator.transfer.tcp import dial_tcp

try:
    load()
    WHY_NOT = ""
except TransferUnavailable as error:
    WHY_NOT = str(error)
MOONCAKE = pytest.param("mooncake", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT))
STREAMS = ("shared", "tcp", MOONCAKE)
"""Kinds of links with a stream of bytes, between processes."""
IN_STREAM = ("shared", "tcp")
"""Kinds whose parts go through that stream as well."""
KINDS = ("local", *STREAMS)
QUICK = Times(beat=0.05, silence=0.3, lease=1.0, dial=0.5, backoff=0.01)
PATIENT = Times(beat=0.05, silence=5.0, lease=20.0, dial=5.0, backoff=0.01)
"""For tests in which nobody falls silent, so that a busy machine is not taken for a dead peer."""
SLOW = Times(silence=10.0, lease=20.0, dial=10.0)
ID = bytes(range(32))
WAIT = 30.0  # nothing here takes that long unless it hangs


def parts_of(sizes, seed=0):
    rng = random.Random(seed)
    return [(f"rows/{i}/ü", rng.randbytes(size)) for i, size in enumerate(sizes)]


def dial_of(kind, listener):
    if kind == "local":
        return listener.dial
    if kind == "shared":
        return functools.partial(dial_shared, listener.address)
    return functools.partial(dial_tcp if kind == "tcp" else transfer.dial_mooncake, *listener.address)


def listen(kind, ring_bytes=4096):
    if kind == "shared":
        return SharedListener(ring_bytes)
    return {"local": LocalListener, "tcp": TcpListener}[kind]() if kind != "mooncake" else transfer.MooncakeListener()


def warm_up():
    """Mooncake's engine starts threads and opens connections to itself, once a process."""
    listener = transfer.MooncakeListener()
    with Sender(listener, times=SLOW) as sender:
        offered = sender.offer(ID, 1)
        offered.put("warm", bytes(5 << 20), timeout=WAIT)
        with Receiver(dial_of("mooncake", listener), times=SLOW).pull(ID, 1) as pull:
            pull.take(timeout=WAIT)


class Wired:
    """A sender and the way to it."""

    def __init__(self, kind, limits=None, times=QUICK, ring_bytes=4096):
        if kind == "mooncake":
            warm_up()
        listener = listen(kind, ring_bytes)
        self.kind, self.limits, self.times = kind, limits or Limits(), times
        self.threads, self.files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        self.dial = dial_of(kind, listener)
        self.sender = Sender(listener, self.limits, times)

    def pull(self, handoff=ID, epoch=1, *, dial=None, limits=None, times=None):
        return Receiver(dial or self.dial, limits or self.limits, times or self.times).pull(handoff, epoch)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.sender.close()

    def check_nothing_is_left(self):
        assert self.sender.held == 0
        until = time.monotonic() + WAIT
        while threading.active_count() > self.threads and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() <= self.threads, threading.enumerate()
        kept = 64 if self.kind == "mooncake" else 0  # connections that its engine keeps for later
        assert len(os.listdir("/proc/self/fd")) <= self.files + kept


def fill(offered, parts, *, pause=0.0):
    """A thread that puts all parts, so that a bounded sender may wait for the test's receiver."""

    def run():
        for name, data in parts:
            offered.put(name, data, timeout=WAIT)
            time.sleep(pause)
        offered.finish()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def move(wired, parts, *, dial=None):
    """All of it from end to end; what came."""
    offered = wired.sender.offer(ID, 1)
    thread = fill(offered, parts)
    with wired.pull(dial=dial) as pull:
        came = list(pull.parts(timeout=WAIT))
        pull.done(timeout=WAIT)
    thread.join()
    offered.wait(timeout=WAIT)
    return came


class Bad:
    """A `Stream` that moves few bytes at a time, ends after some, or changes one: of those that are read here."""

    def __init__(self, stream, *, chop=1 << 30, cut=None, flip=None, pause=0.0):
        self._stream, self._chop, self._cut, self._flip, self._at = stream, chop, cut, flip, 0
        self._pause = pause

    def read_into(self, view, timeout):
        if self._cut is not None and self._at >= self._cut:
            self.stop()
            raise LinkBroken("cut by the test")
        most = self._chop if self._cut is None else min(self._chop, self._cut - self._at)
        done = self._stream.read_into(view[:most], timeout)
        if self._flip is not None and self._at <= self._flip < self._at + done:
            view[self._flip - self._at] ^= 1
        self._at += done
        time.sleep(self._pause * done)
        return done

    def write(self, view, timeout):
        return self._stream.write(view[: self._chop], timeout)

    def stop(self):
        self._stream.stop()

    def close(self):
        self._stream.close()


class Dialer:
    """Dials links with one fault after the other, then sound ones; `links` counts them."""

    def __init__(self, dial, faults):
        self._dial, self._faults, self.links = dial, list(faults), 0

    def __call__(self, timeout):
        self.links += 1
        link = self._dial(timeout)
        link._stream = Bad(link._stream, **(self._faults.pop(0) if self._faults else {}))
        return link


class Relay:
    """Passes bytes between receivers and a TCP sender until it is told to swallow them: a half-open peer."""

    def __init__(self, address):
        self._address, self.swallow = address, False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._open = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                one = self._server.accept()[0]
            except OSError:
                return
            other = socket.create_connection(self._address)
            self._open += [one, other]
            for a, b in ((one, other), (other, one)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, a, b):
        try:
            while data := a.recv(65536):
                if not self.swallow:
                    b.sendall(data)
            b.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self):
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
