"""Sockets of a post, and what makes a message one of ours."""

from __future__ import annotations

import socket
from hashlib import blake2b

import zmq

from kernel_core.check import require

_MAC = 16  # bytes
_HWM = 32  # messages inside of a socket: beyond them our own queue counts bytes as well


def mac_of(secret: bytes, to: bytes, payload: bytes) -> bytes:
    """Keyed; the name's length comes first, so that no byte can move between name and payload."""
    digest = blake2b(len(to).to_bytes(4, "little"), key=secret, digest_size=_MAC)
    digest.update(to)
    digest.update(payload)
    return digest.digest()


def set_up(sock: zmq.Socket[bytes], most_bytes: int) -> None:
    """Peers that are gone without a word are noticed; nothing is kept for those that never come back."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, _HWM)
    sock.setsockopt(zmq.RCVHWM, 4 * _HWM)
    sock.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    sock.setsockopt(zmq.IMMEDIATE, 1)  # before a connection stands, messages wait in our own queue
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 3_000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    sock.setsockopt(zmq.HEARTBEAT_TTL, 10_000)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def bind(pull: zmq.Socket[bytes], host: str, port: int, most_bytes: int) -> str:
    """Listen; the address that others connect to. Raises ValueError, OSError and ZMQError."""
    number = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    require(number not in ("0.0.0.0", "::"), "host", host, "one address under which other machines reach this one")
    set_up(pull, most_bytes)
    pull.setsockopt(zmq.IPV6, int(":" in str(number)))
    shown = f"[{number}]" if ":" in str(number) else number
    pull.bind(f"tcp://{shown}:{port or '*'}")
    return pull.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
