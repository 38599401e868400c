"""The index against a plain model that writes every use down at every block of its path."""

import random

import pytest

from orchestrator.cache.index import BlockIndex, Publish
from orchestrator.cache.leases import Leases
from orchestrator.cache.retention import Retention, RetentionPolicy

ROOT = b"r" * 32
TTL = {Retention.AGENT: 30.0, Retention.CHAT: 70.0}


class Plain:
    """key -> [parent, depth, atime, expiry], every field up to date."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list] = {}

    def use(self, keys: list[bytes], now: float, retention: Retention) -> None:
        for key in keys:
            if key not in self.blocks:
                return
            self.blocks[key][2] = now
            self.blocks[key][3] = max(self.blocks[key][3], now + TTL[retention])

    def victim(self) -> bytes:
        return min(self.blocks, key=lambda key: (self.blocks[key][2], -self.blocks[key][1]))


def tree(rng: random.Random) -> list[list[bytes]]:
    """Paths of a random tree: each shares a random number of first blocks with an earlier one."""
    paths: list[list[bytes]] = []
    for _ in range(12):
        start = rng.choice(paths)[: rng.randint(0, 6)] if paths else []
        paths.append(start + [rng.randbytes(32) for _ in range(rng.randint(1, 6))])
    return paths


@pytest.mark.parametrize("seed", range(30))
def test_random_uses_and_evictions_follow_the_plain_model(seed: int) -> None:
    rng, now = random.Random(seed), 0.0
    index, plain = BlockIndex(RetentionPolicy(ttl=TTL)), Plain()
    paths = tree(rng)
    for _ in range(200):
        now += 1.0
        path, retention = rng.choice(paths), rng.choice(list(Retention))
        what = rng.random()
        if what < 0.5:
            hit = index.match(path)
            index.use(path[:hit], now, retention)
            plain.use(path[:hit], now, retention)
            for depth in range(hit, len(path)):
                parent = path[depth - 1] if depth else ROOT
                assert index.publish(path[depth], parent, 10, now, retention, root=ROOT) is Publish.NEW
                plain.blocks[path[depth]] = [parent, depth, now, now + TTL[retention]]
            plain.use(path, now, retention)
            index.use(path, now, retention)
        elif what < 0.6:  # looking renews nothing
            index.match(path)
            index.present(path)
        elif plain.blocks:
            expected = plain.victim()
            entry = index.oldest()
            assert entry is not None and entry.key == expected
            assert entry.atime == plain.blocks[expected][2]
            assert entry.expiry == plain.blocks[expected][3]
            index.remove(expected)
            del plain.blocks[expected]
        visible = {entry.key for entry in index}
        assert visible == set(plain.blocks)
        assert all(b[0] == ROOT or b[0] in visible for b in plain.blocks.values())
        assert index.used == 10 * len(visible)


def test_publication_needs_its_parent_and_is_idempotent() -> None:
    index = BlockIndex()
    a, b = b"a" * 32, b"b" * 32
    assert index.publish(b, a, 5, 0.0, root=ROOT) is Publish.NO_PARENT
    assert index.publish(a, ROOT, 5, 0.0, root=ROOT, place="here") is Publish.NEW
    assert index.publish(a, ROOT, 5, 0.0, root=ROOT, place="there") is Publish.ALREADY
    entry = index.get(a)
    assert entry is not None and entry.place == "here"
    assert index.used == 5 and len(index) == 1


def test_a_parent_cannot_be_removed_before_its_child() -> None:
    index = BlockIndex()
    a, b = b"a" * 32, b"b" * 32
    index.publish(a, ROOT, 1, 0.0, root=ROOT)
    index.publish(b, a, 1, 0.0, root=ROOT)
    with pytest.raises(ValueError, match="without followers"):
        index.remove(a)
    assert [entry.key for entry in index.drop(a)] == [b, a]


def test_expiry_is_extended_and_never_shortened() -> None:
    index = BlockIndex(RetentionPolicy(ttl=TTL))
    a = b"a" * 32
    index.publish(a, ROOT, 1, 0.0, Retention.CHAT, root=ROOT)
    index.use([a], 10.0, Retention.AGENT)
    entry = index.get(a)
    assert entry is not None and entry.expiry == 70.0
    index.use([a], 60.0, Retention.AGENT)
    assert entry.expiry == 90.0
    assert index.expired(89.0) is None and index.expired(90.0) is entry


def test_leased_paths_stay_until_the_lease_is_over() -> None:
    index = BlockIndex()
    leases = Leases(index)
    a, b = b"a" * 32, b"b" * 32
    index.publish(a, ROOT, 1, 0.0, root=ROOT)
    index.publish(b, a, 1, 0.0, root=ROOT)
    assert leases.take([a, b, b"c" * 32], until=10.0) is None
    held = leases.take([a, b], until=10.0)
    assert held is not None and index.oldest() is None
    with pytest.raises(ValueError, match="leases"):
        index.remove(b)
    assert leases.expire(9.0) == 0 and leases.expire(10.0) == 1
    oldest = index.oldest()
    assert oldest is not None and oldest.key == b
    assert not leases.give(held)
    leases.take([a, b], until=10.0, holder="reader")
    leases.take([a], until=10.0, holder="reader")
    assert leases.drop_holder("reader") == 2 and len(leases) == 0


def test_a_lease_of_an_earlier_life_does_not_touch_the_next() -> None:
    index = BlockIndex()
    leases = Leases(index)
    a = b"a" * 32
    index.publish(a, ROOT, 1, 0.0, root=ROOT)
    old = leases.take([a], until=10.0)
    index.drop(a)
    index.publish(a, ROOT, 1, 1.0, root=ROOT)
    new = leases.take([a], until=10.0)
    assert old is not None and new is not None
    leases.give(old)
    entry = index.get(a)
    assert entry is not None and entry.leases == 1
