"""Snapshots over TCP: a server beside a node's `WindowStore`, and the peer that asks it."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from typing import Any

from orchestrator.cache.windows import WindowKey, WindowStore

_ASK = struct.Struct("<32sQ")
_SIZE = struct.Struct("<q")
_MAX_BYTES = 1 << 30


class WindowServer:
    """Gives a node's snapshots to its peers. Inside a cluster only: whoever reaches the port can read."""

    def __init__(self, windows: WindowStore, host: str = "127.0.0.1", port: int = 0) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                while (asked := _exactly(self.request, _ASK.size)) is not None:
                    chain, boundary = _ASK.unpack(asked)
                    try:
                        sealed = windows.sealed(WindowKey(chain, boundary))
                    except ValueError:
                        return
                    self.request.sendall(_SIZE.pack(-1 if sealed is None else len(sealed)) + (sealed or b""))

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address, daemon_threads = True, True

        self._server = Server((host, port), Handler)
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        threading.Thread(target=self._server.serve_forever, name="windows", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class TcpPeer:
    """Another node's `WindowServer`."""

    def __init__(self, host: str, port: int, timeout_s: float = 0.05) -> None:
        self._address, self._timeout_s = (host, port), timeout_s

    def pull(self, key: WindowKey) -> bytes | None:
        """Raises OSError where the peer is gone or slower than the time-out: replaying is quicker then."""
        with socket.create_connection(self._address, self._timeout_s) as link:
            link.sendall(_ASK.pack(key.chain, key.boundary))
            head = _exactly(link, _SIZE.size)
            size = _SIZE.unpack(head)[0] if head is not None else _MAX_BYTES + 1
            if size < 0:
                return None
            data = _exactly(link, size) if size <= _MAX_BYTES else None
            if data is None:
                raise OSError("the peer broke off")
            return data


def _exactly(link: Any, size: int) -> bytes | None:
    parts, left = [], size
    while left:
        part = link.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
