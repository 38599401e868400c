import random

import pytest

from orchestrator.cache.pool import BlockPool, PoolFull


def total(pool: BlockPool) -> int:
    return sum(pool.counts.values())


def test_a_hit_shares_and_the_last_holder_leaves_it_cached() -> None:
    pool = BlockPool(8)
    first = pool.take(3)
    for block, key in zip(first, (b"0", b"1", b"2"), strict=True):
        pool.publish(block, key)
    found = pool.match([b"0", b"1", b"2", b"3"])
    assert found == first
    pool.hold(found)
    pool.release(first)
    assert pool.counts == {"free": 4, "live": 3, "fenced": 0, "cached": 0}
    pool.release(found)
    assert pool.counts == {"free": 4, "live": 0, "fenced": 0, "cached": 3}
    pool.take(5)  # evicts one: the last of the path
    assert pool.match([b"0", b"1", b"2"]) == first[:2]


def test_a_block_that_a_step_may_still_read_is_not_given_out() -> None:
    pool = BlockPool(3)
    ids = pool.take(2)
    step = pool.launched()
    pool.release(ids)
    with pytest.raises(PoolFull, match="1 blocks wanted, 0 are free or cached of 2"):
        pool.take(1)
    pool.completed(step)
    assert sorted(pool.take(2)) == sorted(ids)


def test_two_writers_of_one_key_keep_their_blocks_and_later_ones_share_the_first() -> None:
    pool = BlockPool(4)
    (a,), (b,) = pool.take(1), pool.take(1)
    assert pool.publish(a, b"k") == a and pool.publish(b, b"k") == a
    pool.release([b])
    assert pool.match([b"k"]) == [a]
    with pytest.raises(ValueError, match="named already"):
        pool.publish(a, b"other")


@pytest.mark.parametrize("bad", [lambda p: p.release([1]), lambda p: p.hold([1]), lambda p: p.publish(1, b"k")])
def test_free_blocks_cannot_be_given_up_or_held(bad) -> None:
    with pytest.raises(ValueError):
        bad(BlockPool(4))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_conserved_and_parents_outlive_children(seed: int) -> None:
    rng, pool = random.Random(seed), BlockPool(24)
    paths = [[bytes([path, depth]) for depth in range(5)] for path in range(6)]
    running: list[list[int]] = []
    for _ in range(500):
        what = rng.random()
        if what < 0.4:
            path = rng.choice(paths)
            hit = pool.match(path)
            pool.hold(hit)
            try:
                new = pool.take(len(path) - len(hit))
            except PoolFull:
                pool.release(hit)
            else:
                assert not set(new) & set(hit)
                for block, key in zip(new, path[len(hit) :], strict=True):
                    pool.publish(block, key)
                running.append(hit + new)
        elif what < 0.7 and running:
            pool.release(running.pop(rng.randrange(len(running))))
        elif what < 0.8:
            pool.launched()
        elif what < 0.85:
            cached = pool.counts["cached"]
            most = rng.randrange(8)
            assert pool.trim(most) == max(0, cached - most) and pool.counts["cached"] == min(cached, most)
        else:
            pool.completed(rng.randint(pool._done, pool._step))
        assert total(pool) == 23
        for path in paths:
            known = [pool.match([key]) != [] for key in path]
            assert known == sorted(known, reverse=True)
    for ids in running:
        pool.release(ids)
    pool.completed(pool._step)
    assert pool.counts["live"] == pool.counts["fenced"] == 0


def test_idle_blocks_are_those_that_holding_takes_away() -> None:
    pool = BlockPool(6)
    ids = pool.take(3)
    for block, key in zip(ids, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.release(ids[1:])
    assert pool.idle(ids) == 2 and pool.available == 4
    pool.hold(ids)
    assert pool.idle(ids) == 0 and pool.available == 2


def test_forgotten_blocks_are_found_by_nobody() -> None:
    pool = BlockPool(6)
    ids = pool.take(3)
    for block, key in zip(ids, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.release(ids[2:])
    pool.forget(ids[1:])
    assert pool.match([b"a", b"b", b"c"]) == ids[:1]
    assert pool.counts == {"free": 3, "live": 2, "fenced": 0, "cached": 0}
    pool.release(ids[:2])
    assert pool.counts == {"free": 4, "live": 0, "fenced": 0, "cached": 1}
