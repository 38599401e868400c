"""The process that writes is killed at every point of every write; what it had confirmed is still there, whole."""

import random
import signal
from pathlib import Path

import pytest
from cache_kit import CHAT, LAYOUT, KillAt, chain, chain_keys, in_child, payload

from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import At, Put
from orchestrator.cache.store.embedded import EmbeddedStore

POLICY = RetentionPolicy(ttl={Retention.AGENT: 10.0, Retention.CHAT: 1000.0}, grace_s=1.0)
CAPACITY = 30_000


def opened(folder: Path, at: At) -> EmbeddedStore:
    return EmbeddedStore(folder, LAYOUT, CAPACITY, POLICY, segment_bytes=2500, at=at)


def life(folder: Path, at: At, say) -> None:
    """Writes, uses, expiry, eviction, compaction, a clean end and a second start."""
    store = opened(folder, at)
    for number in range(4):
        for first in (0, 3):
            piece = chain(number, 6, shared=2, retention=CHAT)[first : first + 3]
            if Put.FULL not in store.write(piece, float(number)):
                say(f"have {number}")
    store.use(chain_keys(1, 6, 2), 5.0, CHAT)
    store.write(chain(9, 6), 5.0)  # of the short class: gone at 15
    say("temporary 9")
    store.collect(6.0)
    store.collect(16.0)
    store.collect(18.0)
    store.close()
    store = opened(folder, at)
    store.write(chain(7, 5, retention=CHAT), 20.0)
    say("have 7")
    store.collect(21.0)
    store.close()


def points(tmp_path: Path) -> list[str]:
    at = KillAt()
    life(tmp_path, at, lambda line: None)
    return at.names


def test_every_kind_of_point_is_reached(tmp_path: Path) -> None:
    assert set(points(tmp_path)) == {
        "segment.create", "segment.write", "segment.half", "segment.sync", "segment.unlink",
        "records.begin", "records.commit", "records.done", "records.delete", "records.deleted",
    }  # fmt: skip


@pytest.mark.parametrize("torn", [False, True])
def test_kill_at_every_point(folder: Path, torn: bool) -> None:
    count = len(points(folder / "dry"))
    rng = random.Random(4)
    for number in range(1, count + 1):
        place = folder / str(number)
        status, said = in_child(lambda say, n=number, f=place: life(f, KillAt(n), say))
        assert status == -signal.SIGKILL, (number, said)
        if torn:
            tear(place, rng)
        confirmed = {int(line.split()[1]) for line in said if line.startswith("have")}
        partly = {int(line.split()[1]) for line in said if said.count(line) == 1 and line.startswith("have")}
        store = opened(place, KillAt())
        for chain_number in confirmed:
            size = 5 if chain_number == 7 else 3 if chain_number in partly else 6
            keys = chain_keys(chain_number, size, 0 if chain_number == 7 else 2)
            assert store.read(keys) == [payload(key) for key in keys], (number, chain_number)
        visible = {entry.key for entry in store.index}
        for entry in store.index:
            assert entry.parent is None or entry.parent.key in visible
            assert store.read([entry.key]) in ([payload(entry.key)], [None])
        live = sum(entry.size for entry in store.index)
        assert sum(store.segments.live.values()) == live + store._collector.waiting
        assert set(store.write(chain(50, 4, retention=CHAT), 30.0)) == {Put.STORED}
        store.close()


def tear(folder: Path, rng: random.Random) -> None:
    """What a power cut may do: bytes that no record points at are lost or are garbage."""
    segments = folder / "segments"
    if not segments.is_dir():
        return
    ends = dict.fromkeys(segments.iterdir(), 0)
    store = opened(folder, KillAt())
    for entry in store.index:
        path = segments / f"segment-{entry.place.segment:010d}.blocks"
        ends[path] = max(ends[path], entry.place.offset + entry.place.size)
    store.close()
    for path, end in ends.items():
        if path.exists():
            data = path.read_bytes()
            keep = rng.randint(min(end, len(data)), len(data))
            path.write_bytes(data[:end] + rng.randbytes(keep - min(end, len(data))))
