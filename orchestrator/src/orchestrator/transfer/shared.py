"""Links between processes of one host: bytes go through shared memory, sockets wake who waits and tell who has died.

A link is a file in shared memory with one ring of bytes for each direction. The sender makes it, with all its room
reserved, and passes it over a Unix socket; its name is removed before anybody maps it, so the memory is free when the
last of both sides has ended, however it ends. Each ring has a socket of its own: a byte of it means "look again".
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import tempfile
import time

from orchestrator.transfer.errors import LinkBroken, require
from orchestrator.transfer.link import Link, StreamLink
from orchestrator.transfer.ring import HEAD_BYTES, Ring
from orchestrator.transfer.tcp import wait_for

BACK_BYTES = 64 << 10  # answers of a receiver are short
_PAUSE = 0.02  # seconds before a listener that has just failed is asked again
_PEER = struct.Struct("3i")  # process, user, group
_SHARED = "/dev/shm"


class RingStream:
    """A `Stream` over two rings, which it owns with their memory and sockets."""

    def __init__(self, memory: mmap.mmap, out: Ring, into: Ring) -> None:
        self._memory, self._out, self._into = memory, out, into

    def read_into(self, view: memoryview, timeout: float) -> int:
        return self._into.read_into(view, timeout)

    def write(self, view: memoryview, timeout: float) -> int:
        return self._out.write(view, timeout)

    def stop(self) -> None:
        self._out.stop()
        self._into.stop()

    def close(self) -> None:
        self._out.close()
        self._into.close()
        with contextlib.suppress(BufferError):  # a thread is in a call still; the memory goes with it
            self._memory.close()


class SharedListener:
    """Listens at a Unix socket in the abstract namespace, `address`, to processes of the same user.

    Args:
        ring_bytes: of each link's ring from sender to receiver. A link takes 64 KiB more.
    """

    def __init__(self, ring_bytes: int = 4 << 20) -> None:
        require(4096 <= ring_bytes <= 1 << 32, "ring_bytes", ring_bytes, "4096 to 2**32")
        self._ring_bytes, self._closed = ring_bytes, False
        self.address = f"fathom-transfer-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.address)
        self._socket.listen(128)
        self._socket.setblocking(False)

    def accept(self, timeout: float) -> Link | None:
        if self._closed:
            raise LinkBroken("the listener is closed")
        if not wait_for(self._socket, select.POLLIN, timeout):
            return None
        try:
            forth = self._socket.accept()[0]
        except BlockingIOError:
            return None
        except OSError:  # too many open files, or closed: the next call tells
            time.sleep(_PAUSE)
            return None
        try:
            _, user, _ = _PEER.unpack(forth.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user not in (os.getuid(), 0):  # such an address has no file, so no permissions
                forth.close()
                return None
            return self._make(forth)
        except OSError:  # no room in shared memory: the receiver sees the end, and dials again
            forth.close()
            return None

    def _make(self, forth: socket.socket) -> Link:
        size = self._ring_bytes + BACK_BYTES + 2 * HEAD_BYTES
        file, path = tempfile.mkstemp(prefix="fathom-transfer-", dir=_SHARED)
        try:
            os.unlink(path)
            os.posix_fallocate(file, 0, size)  # now, or a full /dev/shm would kill who writes
            back, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                socket.send_fds(forth, [str(self._ring_bytes).encode()], [file, theirs.fileno()])
            return _link(file, self._ring_bytes, forth, back, sends=True)
        finally:
            os.close(file)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def dial_shared(address: str, timeout: float) -> Link:
    """A link to the process that listens at `address`. Raises OSError where nobody answers in time."""
    until = time.monotonic() + timeout
    forth = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    files: list[int] = []
    try:
        forth.settimeout(timeout)
        forth.connect("\0" + address)
        forth.settimeout(max(0.001, until - time.monotonic()))
        size, files, _, _ = socket.recv_fds(forth, 32, 2)
        if len(files) != 2:
            raise LinkBroken("the sender gives no link: it has no room for one, or runs as another user")
        return _link(files[0], int(size), forth, socket.socket(fileno=os.dup(files[1])), sends=False)
    except BaseException:
        forth.close()
        raise
    finally:
        for file in files:
            os.close(file)


def _link(file: int, ring_bytes: int, forth: socket.socket, back: socket.socket, *, sends: bool) -> Link:
    memory = mmap.mmap(file, ring_bytes + BACK_BYTES + 2 * HEAD_BYTES)
    view = memoryview(memory)
    split = ring_bytes + HEAD_BYTES
    rings = Ring(view[:split], forth), Ring(view[split:], back)
    view.release()
    out, into = rings if sends else rings[::-1]
    return StreamLink(RingStream(memory, out, into))
