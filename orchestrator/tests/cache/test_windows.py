import contextlib
import random
import socket
import struct
import threading
import time

import pytest

from orchestrator.cache.block_object import HEADER_BYTES
from orchestrator.cache.window_peer import TcpPeer, WindowServer
from orchestrator.cache.windows import WindowKey, WindowStore

LAYOUT = b"W" * 32
SNAPSHOT = random.Random(6).randbytes(5000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(number: int, boundary: int = 256) -> WindowKey:
    return WindowKey(bytes([number]) * 32, boundary)


def test_a_snapshot_lives_for_minutes_from_its_last_use() -> None:
    clock = Clock()
    windows = WindowStore(LAYOUT, 1 << 20, life_s=600.0, clock=clock)
    windows.put(key(1), SNAPSHOT)
    windows.put(key(2), SNAPSHOT)
    clock.now = 500.0
    assert windows.get(key(1)) == SNAPSHOT and windows.has(key(2))
    clock.now = 700.0
    assert windows.get(key(2)) is None and windows.get(key(1)) == SNAPSHOT
    clock.now = 1300.0
    assert not windows.has(key(1)) and windows.used == 0 and len(windows) == 0


def test_key_and_boundary_both_count() -> None:
    windows = WindowStore(LAYOUT, 1 << 20)
    windows.put(key(1, 256), SNAPSHOT)
    assert windows.get(key(1, 384)) is None and windows.get(key(2, 256)) is None
    with pytest.raises(ValueError, match="boundary: got 100, allowed are multiples of 128"):
        key(1, 100)


def test_the_least_recently_used_go_first_and_the_bytes_are_bounded() -> None:
    size = HEADER_BYTES + len(SNAPSHOT)
    windows = WindowStore(LAYOUT, 3 * size)
    for number in range(3):
        windows.put(key(number), SNAPSHOT)
    windows.get(key(0))
    windows.put(key(3), SNAPSHOT)
    assert [windows.has(key(n)) for n in range(4)] == [True, False, True, True] and windows.used == 3 * size
    assert not windows.put(key(4), bytes(4 * size)) and windows.used == 3 * size
    windows.put(key(0), b"shorter")
    assert windows.get(key(0)) == b"shorter"


def test_peers_are_asked_in_order_and_wrong_bytes_are_passed_over() -> None:
    class Broken:
        def first(self, keys):
            raise OSError("gone")

    class Liar:
        def __init__(self, change) -> None:
            self.change = change

        def first(self, keys):
            found = has.first(keys)
            return (found[0], self.change(bytearray(found[1]))) if found is not None else None

    def flipped(data: bytearray) -> bytes:
        data[900] ^= 1
        return bytes(data)

    has = WindowStore(LAYOUT, 1 << 20)
    has.put(key(1), SNAPSHOT)
    other = WindowStore(LAYOUT, 1 << 20)
    other.put(WindowKey(key(1).chain, 384), b"of another boundary")

    class Mixed:
        def first(self, keys):
            sealed = other.sealed(WindowKey(keys[0].chain, 384))
            return None if sealed is None else (keys[0], sealed)

    class Unasked:
        def first(self, keys):
            return key(1, 512), has.sealed(key(1))

    here = WindowStore(LAYOUT, 1 << 20, peers=[Broken(), Liar(flipped), Mixed(), Unasked(), Liar(bytes)])
    assert here.get(key(1)) is None
    assert here.pull([key(1)]) == key(1)
    assert here.get(key(1)) == SNAPSHOT
    assert here.counters["peer_errors"] == 1 and here.counters["wrong"] == 2 and here.counters["pulled"] == 1
    assert here.pull([key(9)]) is None
    strange = WindowStore(b"X" * 32, 1 << 20, peers=[Liar(bytes)])
    assert strange.pull([key(1)]) is None and strange.counters["wrong"] == 1


def test_the_best_of_several_is_pulled_and_nothing_worse_than_what_is_here() -> None:
    has, asked = WindowStore(LAYOUT, 1 << 20), []

    class Noting:
        def first(self, keys):
            asked.append(list(keys))
            return has.first(keys)

    keys = [key(n, 128 * n) for n in (5, 4, 3, 2, 1)]
    here = WindowStore(LAYOUT, 1 << 20, peers=[Noting()])
    for number in (4, 2):
        has.put(key(number, 128 * number), SNAPSHOT)
    here.put(keys[2], SNAPSHOT)
    assert here.pull(keys) == keys[1] and asked == [keys[:2]]
    assert here.pull(keys[1:]) == keys[1] and here.pull(keys[2:]) == keys[2] and len(asked) == 1
    assert here.pull([keys[0], keys[2]]) == keys[2] and asked[1:] == [keys[:1]]


def test_over_tcp() -> None:
    has = WindowStore(LAYOUT, 1 << 24)
    big = random.Random(7).randbytes(1_415_040)
    has.put(key(1), big)
    server = WindowServer(has)
    here = WindowStore(LAYOUT, 1 << 24, peers=[TcpPeer(*server.address, timeout_s=10.0)])
    assert here.pull([key(4), key(1)]) == key(1) and here.get(key(1)) == big and here.pull([key(2)]) is None
    server.close()
    assert here.pull([key(3)]) is None and here.counters["peer_errors"] == 1


def test_a_slow_peer_costs_its_time_out_and_a_wrong_one_an_error() -> None:
    """A peer that says nothing, that trickles, that answers nonsense; a server that is asked nonsense goes on."""

    def serving(answer):
        door = socket.create_server(("127.0.0.1", 0))

        def run() -> None:
            link, _ = door.accept()
            with link, contextlib.suppress(OSError):
                answer(link)

        threading.Thread(target=run, daemon=True).start()
        return TcpPeer(*door.getsockname(), timeout_s=0.2)

    def trickle(link) -> None:
        link.sendall(struct.pack("<iq", 0, 1000))
        while True:
            link.sendall(b"x")
            time.sleep(0.01)

    for answer in (lambda link: time.sleep(5), trickle, lambda link: link.sendall(struct.pack("<iq", 7, 3)),
                   lambda link: link.sendall(struct.pack("<iq", 0, 1 << 40)), lambda link: None):  # fmt: skip
        with pytest.raises(OSError):
            serving(answer).first([key(1)])
    has = WindowStore(LAYOUT, 1 << 20)
    has.put(key(1), SNAPSHOT)
    server = WindowServer(has)
    for nonsense in (bytes(4), b"\xff" * 4, struct.pack("<I32sQ", 1, bytes(32), 5)):
        with socket.create_connection(server.address) as link:
            link.sendall(nonsense)
            assert link.recv(1) == b""
    assert TcpPeer(*server.address, timeout_s=10.0).first([key(1)])[0] == key(1)
    server.close()
