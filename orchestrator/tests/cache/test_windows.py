import random

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
        def pull(self, key: WindowKey) -> bytes | None:
            raise OSError("gone")

    class Liar:
        def __init__(self, change) -> None:
            self.change = change

        def pull(self, key: WindowKey) -> bytes | None:
            sealed = has.sealed(key)
            return self.change(bytearray(sealed)) if sealed is not None else None

    def flipped(data: bytearray) -> bytes:
        data[900] ^= 1
        return bytes(data)

    has = WindowStore(LAYOUT, 1 << 20)
    has.put(key(1), SNAPSHOT)
    other = WindowStore(LAYOUT, 1 << 20)
    other.put(WindowKey(key(1).chain, 384), b"of another boundary")

    class Mixed:
        def pull(self, asked: WindowKey) -> bytes | None:
            return other.sealed(WindowKey(asked.chain, 384))

    here = WindowStore(LAYOUT, 1 << 20, peers=[Broken(), Liar(flipped), Mixed(), Liar(bytes)])
    assert here.get(key(1)) is None
    assert here.pull(key(1)) == SNAPSHOT
    assert here.get(key(1)) == SNAPSHOT
    assert here.counters["peer_errors"] == 1 and here.counters["wrong"] == 2 and here.counters["pulled"] == 1
    assert here.pull(key(9)) is None
    strange = WindowStore(b"X" * 32, 1 << 20, peers=[Liar(bytes)])
    assert strange.pull(key(1)) is None and strange.counters["wrong"] == 1


def test_over_tcp() -> None:
    has = WindowStore(LAYOUT, 1 << 24)
    big = random.Random(7).randbytes(1_415_040)
    has.put(key(1), big)
    server = WindowServer(has)
    here = WindowStore(LAYOUT, 1 << 24, peers=[TcpPeer(*server.address, timeout_s=10.0)])
    assert here.pull(key(1)) == big and here.pull(key(2)) is None
    server.close()
    assert here.pull(key(3)) is None and here.counters["peer_errors"] == 1
