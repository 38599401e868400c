"""Messages between the processes of a service: at most once, without order between pairs, and nobody ever waits.

The cores repeat what matters, so a message that finds no room is dropped and counted. Each carries a keyed checksum:
what does not verify with the service's secret is never decoded.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from kernel_core.check import require
from orchestrator.service.messages import decode, encode
from orchestrator.service.post.queue import Letter, PostQueue
from orchestrator.service.post.wire import bind, mac_of, set_up

MOST_BYTES = 64 << 20  # of one message
MOST_LOCAL = 65_536  # messages to parties of this process that wait
_NAME = 256  # bytes of a party's name
_TURN = 128  # messages of one kind of work before the other has its turn
_log = logging.getLogger(__name__)

Inbox = Callable[[str, Any], None]


class Post:
    """One bound socket that receives, one a peer that sends, all owned by one thread.

    Args:
        inbox: called in the post's thread with (name of the party, message); it has to be quick.
        secret: 16 to 64 bytes, the same in all processes of a service.
        host: address of this machine under which the others reach it. port: 0 for a free one.

    Raises:
        ValueError: the host or the secret cannot be used, or the port is taken.

    Attributes:
        counts: sent, received, forged (not verified), broken (verified, but no message of ours), "dropped: ..." by
            reason.
    """

    def __init__(self, inbox: Inbox, *, secret: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        require(16 <= len(secret) <= 64, "secret", f"{len(secret)} bytes", "16 to 64 bytes")
        self._inbox, self._secret = inbox, secret
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._book: dict[str, str] = {}
        self._queues: dict[str, PostQueue] = {}  # by address
        self._local: deque[tuple[str, Any]] = deque()
        self._closing: float | None = None  # until when what waits may still go out
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        try:
            self._address = bind(self._pull, host, port, MOST_BYTES)
        except (zmq.ZMQError, OSError) as error:
            self._pull.close(0)
            self._context.term()
            raise ValueError(f"host: cannot listen at {host}:{port} ({error})") from None
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # of the thread
        self._unusable: set[str] = set()  # addresses that are none
        self._bell_in, self._bell = socket.socketpair()
        self._bell_in.setblocking(False)
        self._bell.setblocking(False)
        self._rung = False
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self._bell_in, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="post", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Such as "tcp://127.0.0.1:41234"."""
        return self._address

    def send(self, to: str, message: Any) -> bool:
        """Post a message, from any thread. False: it is dropped, as nobody knows the party or its queue is full.

        True does not promise that it arrives.
        """
        with self._lock:
            why = self._obstacle(to, 0)
            local = self._book.get(to) == self._address
            if not why and local:
                self._local.append((to, message))
                self._ring()
                return True
        if not why:
            payload = encode(message)
            frames = (to.encode(), payload, mac_of(self._secret, to.encode(), payload))
            with self._lock:
                why = self._obstacle(to, len(payload))
                if not why:
                    self._queues[self._book[to]].put(Letter(frames, time.monotonic()))
                    self._ring()
                    return True
        with self._lock:
            self.counts[f"dropped: {why}"] += 1
        return False

    def know(self, addresses: Mapping[str, str]) -> None:
        """Replace the book. What waits for an address that is not in it any more is dropped."""
        with self._lock:
            self._book = dict(addresses)
            kept = set(self._book.values()) - {self._address}
            for address in self._queues.keys() - kept:
                moved = len(self._queues.pop(address))
                if moved:
                    self.counts["dropped: moved"] += moved
            for address in kept - self._queues.keys():
                self._queues[address] = PostQueue()
            self._ring()

    def close(self, flush: float = 0.0) -> None:
        """End the thread and the sockets; what waits has `flush` seconds to go out. Twice is no error."""
        with self._lock:
            if self._closing is None:
                self._closing = time.monotonic() + flush
                self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=flush + 10.0)

    def _obstacle(self, to: str, size: int) -> str:
        """Why a message cannot go out; the lock is held."""
        if self._closing is not None:
            return "closed"
        address = self._book.get(to)
        if address is None:
            return "unknown"
        if address == self._address:
            return "" if len(self._local) < MOST_LOCAL else "full"
        if size > MOST_BYTES or len(to.encode()) > _NAME:
            return "too large"
        return "" if self._queues[address].fits(size) else "full"

    def _ring(self) -> None:
        """Wake the thread; the lock is held."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # full: it is awake; or closed
                self._bell.send(b"\0")

    # The thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    closing, waits = self._closing, bool(self._local)
                    pending = any(map(len, self._queues.values()))
                if closing is not None and (time.monotonic() >= closing or not (waits or pending)):
                    break
                self._turn(0 if waits else 50 if closing is not None else 1000)
        except Exception:
            _log.exception("post: its thread has failed")
        finally:
            self._end()

    def _turn(self, wait: int) -> None:
        """One round of everything, after at most `wait` milliseconds."""
        ready = dict(self._poller.poll(wait))
        with self._lock:
            if self._rung:
                self._rung = False
                with contextlib.suppress(OSError):
                    self._bell_in.recv(4096)
        self._connect()
        for address in list(self._sockets):
            self._push(address)
        for address in self._unusable:
            self._drop_all(address, "no address")
        self._deliver_local()
        if self._pull in ready:
            self._receive()

    def _connect(self) -> None:
        """Have a socket for each address of the book, and for no other."""
        with self._lock:
            wanted = set(self._queues)
        for address in self._sockets.keys() - wanted:
            self._disconnect(address)
        self._unusable &= wanted
        for address in wanted - self._sockets.keys() - self._unusable:
            push = self._context.socket(zmq.PUSH)
            try:
                set_up(push, MOST_BYTES)
                push.setsockopt(zmq.IPV6, int("[" in address))
                push.connect(address)
            except zmq.ZMQError as error:
                push.close(0)
                self._unusable.add(address)
                _log.error("post: %s is no address (%s)", address, error)
                continue
            self._sockets[address] = push

    def _disconnect(self, address: str) -> None:
        push = self._sockets.pop(address)
        if push in self._poller:
            self._poller.unregister(push)
        push.close(0)

    def _drop_all(self, address: str, why: str) -> None:
        with self._lock:
            queue = self._queues.get(address)
            while queue:
                queue.pop()
                self.counts[f"dropped: {why}"] += 1

    def _push(self, address: str) -> None:
        """Give to a peer's socket what it takes; poll it while something is left."""
        push = self._sockets[address]
        blocked = False
        for _ in range(_TURN):
            with self._lock:
                queue = self._queues.get(address)
                if not queue:
                    break
                letter = queue.head  # it counts as waiting until it has gone
            try:
                push.send_multipart(letter.frames, zmq.NOBLOCK, copy=letter.size < 65_536)
            except zmq.Again:
                blocked = True
                with self._lock:
                    late = queue.forget_late(time.monotonic())
                    if late and self._queues.get(address) is queue:
                        self.counts["dropped: late"] += late
                break
            with self._lock:
                queue.pop()
                self.counts["sent"] += 1
        else:
            blocked = True
        if blocked:
            self._poller.register(push, zmq.POLLOUT)
        elif push in self._poller:
            self._poller.unregister(push)

    def _deliver_local(self) -> None:
        for _ in range(_TURN):
            with self._lock:
                item = self._local.popleft() if self._local else None
            if item is None:
                return
            self._deliver(*item)

    def _receive(self) -> None:
        for _ in range(_TURN):
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or not hmac.compare_digest(frames[2], mac_of(self._secret, *frames[:2])):
                with self._lock:
                    self.counts["forged"] += 1
                continue
            try:
                to, message = frames[0].decode(), decode(frames[1])
            except ValueError:
                with self._lock:
                    self.counts["broken"] += 1
                continue
            with self._lock:
                self.counts["received"] += 1
            self._deliver(to, message)

    def _deliver(self, to: str, message: Any) -> None:
        try:
            self._inbox(to, message)
        except Exception:
            _log.exception("post: %s could not be delivered to %s", type(message).__name__, to)
            with self._lock:
                self.counts["dropped: inbox"] += 1

    def _end(self) -> None:
        with self._lock:
            self._closing = self._closing or time.monotonic()
            left = max(0, min(5000, int(1000 * (self._closing - time.monotonic()))))
            left_over = sum(map(len, self._queues.values())) + len(self._local)
            if left_over:
                self.counts["dropped: closed"] += left_over
            self._queues.clear()
            self._book.clear()
            self._local.clear()
        for push in self._sockets.values():
            push.close(left)
        self._sockets.clear()
        self._pull.close(0)
        self._context.term()  # waits for `left` at most
        self._bell.close()
        self._bell_in.close()
