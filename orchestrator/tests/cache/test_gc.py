import random

import pytest

from orchestrator.cache.gc import Collector, FreeBytes, Lost, Tick, Unpublish, orphans
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.leases import Leases
from orchestrator.cache.retention import Retention, RetentionPolicy

ROOT = b"r" * 32


def filled(policy: RetentionPolicy, chains: int, depth: int, tenant: str = "") -> tuple[BlockIndex, list[list[bytes]]]:
    index, paths, rng = BlockIndex(policy), [], random.Random(5)
    for chain in range(chains):
        keys = [rng.randbytes(32) for _ in range(depth)]
        for number, key in enumerate(keys):
            parent = keys[number - 1] if number else ROOT
            index.publish(key, parent, 100, float(chain), root=ROOT, tenant=tenant, place=number)
        paths.append(keys)
    return index, paths


def test_watermarks_remove_the_oldest_and_the_last_of_a_path_first() -> None:
    index, paths = filled(RetentionPolicy(high=0.85, low=0.8, grace_s=5), chains=10, depth=10)
    collector = Collector(index, capacity=11_000)
    actions = collector.step(Tick(), 20.0)
    assert [type(a) for a in actions] == [Unpublish]
    removed = [entry.key for entry in actions[0].entries]
    assert removed == [*reversed(paths[0]), *reversed(paths[1])][: len(removed)]
    assert index.used == 8_800
    assert collector.step(Tick(), 24.9) == []
    freed = collector.step(Tick(), 25.0)
    assert isinstance(freed[0], FreeBytes) and [place[0] for place in freed[0].places] == removed
    assert collector.waiting == 0


def test_below_the_high_mark_nothing_goes() -> None:
    index, _ = filled(RetentionPolicy(), chains=8, depth=10)
    assert Collector(index, capacity=10_000).step(Tick(), 20.0) == []


def test_expired_blocks_go_first_and_leased_ones_stay() -> None:
    policy = RetentionPolicy(ttl={Retention.AGENT: 100.0, Retention.CHAT: 700.0})
    index, paths = filled(policy, chains=3, depth=4)
    leases = Leases(index)
    leases.take(paths[0], until=500.0)
    index.use(paths[2], 50.0, Retention.CHAT)
    (action,) = Collector(index, 10**9, leases).step(Tick(), 110.0)
    assert isinstance(action, Unpublish) and action.why == "expired"
    assert [entry.key for entry in action.entries] == paths[1][::-1]
    assert {entry.key for entry in index} == {*paths[0], *paths[2]}


def test_a_tenant_over_its_budget_gives_up_its_own_blocks_only() -> None:
    policy = RetentionPolicy(budgets={"big": 500})
    index, _ = filled(policy, chains=1, depth=10, tenant="big")
    index.publish(b"o" * 32, ROOT, 100, -5.0, root=ROOT, tenant="other")
    (action,) = Collector(index, 10**9).step(Tick(), 1.0)
    assert isinstance(action, Unpublish) and action.why == "budget" and len(action.entries) == 5
    assert index.used_by == {"big": 500, "other": 100}


def test_probes_do_not_keep_a_block_alive() -> None:
    policy = RetentionPolicy(ttl={Retention.AGENT: 100.0, Retention.CHAT: 700.0})
    index, paths = filled(policy, chains=1, depth=3)
    collector = Collector(index, 10**9)
    for now in range(1, 99):
        index.match(paths[0])
        index.present(paths[0])
        assert collector.step(Tick(), float(now)) == []
    assert collector.step(Tick(), 100.0) and not len(index)


def test_lost_bytes_take_their_followers_along() -> None:
    index, paths = filled(RetentionPolicy(), chains=2, depth=5)
    (action,) = Collector(index, 10**9).step(Lost(paths[0][2]), 1.0)
    assert isinstance(action, Unpublish)
    assert [entry.key for entry in action.entries] == [paths[0][4], paths[0][3], paths[0][2]]
    assert index.match(paths[0]) == 2 and index.match(paths[1]) == 5


@pytest.mark.parametrize("seed", range(10))
def test_random_life_keeps_the_order_and_the_sums(seed: int) -> None:
    rng = random.Random(seed)
    policy = RetentionPolicy(ttl={Retention.AGENT: 40.0, Retention.CHAT: 90.0}, grace_s=3.0, budgets={"t1": 900})
    index = BlockIndex(policy)
    leases = Leases(index)
    collector = Collector(index, 4_000, leases)
    paths = [[rng.randbytes(32) for _ in range(rng.randint(1, 8))] for _ in range(10)]
    stored, now = {}, 0.0
    for _ in range(400):
        now += rng.random()
        path, tenant = rng.choice(paths), rng.choice(["t1", "t2"])
        if rng.random() < 0.6:
            for depth, key in enumerate(path):
                parent = path[depth - 1] if depth else ROOT
                index.publish(key, parent, 100, now, rng.choice(list(Retention)), root=ROOT, tenant=tenant)
                entry = index.get(key)
                assert entry is not None
                stored[key, entry.generation] = True
            index.use(path, now, Retention.AGENT)
        elif rng.random() < 0.3:
            leases.take(path[: index.match(path)], now + 5, "r")
        for action in collector.step(Tick(), now):
            if isinstance(action, Unpublish):
                gone = [entry.key for entry in action.entries]
                assert all(entry.parent is None or entry.parent.key not in gone[: gone.index(entry.key)]
                           for entry in action.entries)  # fmt: skip
                assert all(not entry.leases for entry in action.entries)
            else:
                for key, generation, _ in action.places:
                    assert stored.pop((key, generation))
        visible = {entry.key for entry in index}
        assert all(entry.parent is None or entry.parent.key in visible for entry in index)
        assert index.used == 100 * len(visible) == sum(index.used_by.values())
        assert len(stored) * 100 == index.used + collector.waiting


def test_orphans_both_ways() -> None:
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    missing, stray = orphans([(a, 1), (b, 2)], {(a, 1): 0.0, (b, 1): 0.0, (c, 3): 95.0}, now=100.0, age=10.0)
    assert missing == [b] and stray == [(b, 1)]
