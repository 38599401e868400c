"""Snapshots over TCP: a server beside a node's `WindowStore`, and the peer that asks it.

A question is a count and so many keys (32 bytes, boundary); the answer is the place of the first key that is there, or
-1, and a sealed snapshot behind its size.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.cache.windows import WindowKey, WindowStore

MOST_KEYS = 1024
"""Keys that one question may name."""
_COUNT = struct.Struct("<I")
_KEY = struct.Struct("<32sQ")
_ANSWER = struct.Struct("<iq")
_MAX_BYTES = 1 << 30
_IDLE_S = 60.0


class WindowServer:
    """Gives a node's snapshots to its peers. Inside a cluster only: whoever reaches the port can read.

    A message that is none, and a peer that says nothing for a minute, are cut off; others go on.
    """

    def __init__(self, windows: WindowStore, host: str = "127.0.0.1", port: int = 0) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    while (keys := _read_keys(self.request)) is not None:
                        found = windows.first(keys)
                        place, sealed = (-1, b"") if found is None else (keys.index(found[0]), found[1])
                        self.request.sendall(_ANSWER.pack(place, len(sealed)) + sealed)
                except (OSError, ValueError):
                    return

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address, daemon_threads = True, True

        self._server = Server((host, port), Handler)
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        threading.Thread(target=self._server.serve_forever, name="windows", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class TcpPeer:
    """Another node's `WindowServer`.

    Args:
        timeout_s: seconds that one answer may take from beginning to end: replaying is quicker than a slow peer.
    """

    def __init__(self, host: str, port: int, timeout_s: float = 0.05) -> None:
        self._address, self._timeout_s = (host, port), timeout_s

    def first(self, keys: Sequence[WindowKey]) -> tuple[WindowKey, bytes] | None:
        """See `windows.Peer`. Raises OSError where the peer is gone, too slow, or sends what is no answer."""
        until, keys = time.monotonic() + self._timeout_s, keys[:MOST_KEYS]
        with socket.create_connection(self._address, self._timeout_s) as link:
            question = b"".join(_KEY.pack(key.chain, key.boundary) for key in keys)
            link.settimeout(_left(until))
            link.sendall(_COUNT.pack(len(keys)) + question)
            head = _exactly(link, _ANSWER.size, until)
            if head is None:
                raise OSError("the peer broke off")
            place, size = _ANSWER.unpack(head)
            if place < 0:
                return None
            if place >= len(keys) or not 0 <= size <= _MAX_BYTES:
                raise OSError(f"the peer's answer is none: place {place}, {size} bytes")
            data = _exactly(link, size, until)
            if data is None:
                raise OSError("the peer broke off")
            return keys[place], data


def _read_keys(link: Any) -> list[WindowKey] | None:
    """A question's keys, None where the peer has gone. Raises ValueError for what is no question, OSError."""
    head = _exactly(link, _COUNT.size, time.monotonic() + _IDLE_S)
    if head is None:
        return None
    (count,) = _COUNT.unpack(head)
    if not 1 <= count <= MOST_KEYS:
        raise ValueError(f"count: got {count}, allowed are 1 to {MOST_KEYS}")
    data = _exactly(link, count * _KEY.size, time.monotonic() + _IDLE_S)
    return None if data is None else [WindowKey(*fields) for fields in _KEY.iter_unpack(data)]


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left


def _exactly(link: Any, size: int, until: float) -> bytes | None:
    parts, left = [], size
    while left:
        link.settimeout(_left(until))
        part = link.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
