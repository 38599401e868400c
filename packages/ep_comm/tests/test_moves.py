"""Transfers of bytes beside collectives."""

from __future__ import annotations

import time

import pytest
import torch
from rank_group import check_round_trip, on_threads, random_step, results_of, round_trip

import ep_comm
from ep_comm import Shape, Transfer

SMALL = Shape(4, 3, 32, 2, 2)


def _bytes(seed, n):
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def _one(comms, tag, data, target):
    """A transfer from rank 0 to rank 1, one `Moving` of each side."""
    return comms[0].move([Transfer(tag, 0, 1, data)]), comms[1].move([Transfer(tag, 0, 1, target)])


@pytest.mark.parametrize("size", [0, 1, 1000, 4096, 3_000_001])
@pytest.mark.parametrize("first", ["source", "target"])
def test_bytes_arrive_whoever_comes_first(size, first):
    comms = ep_comm.threads(SMALL, timeout=20)
    data, back = _bytes(size, size), torch.zeros(size + 128, dtype=torch.uint8)
    target = back[64 : 64 + size]

    def work(rank):
        if rank > 1:
            return None
        if (first == "source") == (rank == 1):
            time.sleep(0.02)
        moving = comms[rank].move([Transfer(7, 0, 1, data if rank == 0 else target)])
        moving.wait()
        return moving.done()

    assert results_of(4, work)[:2] == [True, True]
    assert torch.equal(target, data)
    assert not back[:64].any() and not back[64 + size :].any()


def test_all_pairs_at_once_while_steps_go_on():
    comms = ep_comm.threads(SMALL, timeout=20)
    pairs = [(s, t) for s in range(4) for t in range(4) if s != t]
    data = {(s, t, i): _bytes(100 * s + 10 * t + i, 50_000 + 1000 * i) for s, t in pairs for i in range(3)}
    targets = {key: torch.zeros_like(value) for key, value in data.items()}
    step = random_step(SMALL, 4)
    got = []

    def work(rank):
        mine = [key for key in data if rank in key[:2]]
        if rank % 2:  # the two sides need no order in common
            mine.reverse()
        moving = comms[rank].move([Transfer(i, s, t, (data if s == rank else targets)[s, t, i]) for s, t, i in mine])
        results = [round_trip(comms[rank], step) for _ in range(20)]
        moving.wait()
        return results[-1]

    got = results_of(4, work)
    check_round_trip(SMALL, step, got, fixed=False, slots=True, epoch=39)
    assert all(torch.equal(targets[key], data[key]) for key in data)


def test_more_transfers_than_a_pair_has_places_for():
    comms = ep_comm.threads(Shape(2, 1, 4, 1, 1), timeout=20)
    data, target = _bytes(1, 300 * 40).reshape(300, 40), torch.zeros(300, 40, dtype=torch.uint8)
    receiving = comms[1].move([Transfer(i, 0, 1, target[i]) for i in range(300)])
    assert not receiving.done()
    sending = comms[0].move([Transfer(i, 0, 1, data[i]) for i in reversed(range(300))])
    sending.wait()
    receiving.wait()
    assert torch.equal(target, data)


def test_a_tag_is_used_again_after_its_transfer():
    comms = ep_comm.threads(Shape(2, 1, 4, 1, 1), timeout=20)
    for seed in range(5):
        data, target = _bytes(seed, 20_000), torch.zeros(20_000, dtype=torch.uint8)
        for moving in _one(comms, 3, data, target):
            moving.wait()
        assert torch.equal(target, data)


def test_a_side_that_does_not_come_breaks_nothing():
    comms = ep_comm.threads(Shape(2, 1, 4, 1, 1), timeout=20)
    late = torch.full((1000,), 9, dtype=torch.uint8)
    alone = comms[1].move([Transfer(5, 0, 1, late)])
    with pytest.raises(ep_comm.PeerTimeout, match=r"rank 1 waited 0.1 s for rank 0 in move"):
        alone.wait(0.1)
    with pytest.raises(ep_comm.PeerTimeout):
        alone.done()
    results_of(2, lambda rank: comms[rank].barrier())
    sending = comms[0].move([Transfer(5, 0, 1, _bytes(1, 1000))])
    with pytest.raises(ep_comm.PeerTimeout, match="rank 0 waited"):
        sending.wait(0.1)
    assert (late == 9).all()  # given up: nothing is written there
    data, target = _bytes(2, 1000), torch.zeros(1000, dtype=torch.uint8)
    for moving in _one(comms, 5, data, target):
        moving.wait()
    assert torch.equal(target, data)


def test_given_up_halfway_and_begun_anew():
    shape = Shape(2, 1, 4, 1, 1)
    comms = ep_comm.threads(shape, timeout=20)
    big = 64 << 20  # more than a ring holds
    data = torch.zeros(big, dtype=torch.uint8)
    data[-1] = 1
    for _ in range(50):  # until one is seen under way, whatever else this machine does
        first = torch.zeros(big, dtype=torch.uint8)
        sending, receiving = _one(comms, 1, data, first)
        try:
            receiving.wait(0)
        except ep_comm.PeerTimeout:
            break
        sending.wait()
    else:
        pytest.fail("each transfer was over before it could be given up")
    held = first.clone()
    second = torch.zeros(big, dtype=torch.uint8)
    again = comms[1].move([Transfer(1, 0, 1, second)])
    again.wait()
    sending.wait()
    assert torch.equal(second, data) and torch.equal(first, held)


def test_sides_with_different_sizes():
    comms = ep_comm.threads(Shape(2, 1, 4, 1, 1), timeout=20)
    for moving in _one(comms, 1, _bytes(1, 100), torch.zeros(99, dtype=torch.uint8)):
        with pytest.raises(ep_comm.Mismatch, match=r"transfer 1: .*expects 99 bytes"):
            moving.wait()
    results_of(2, lambda rank: comms[rank].barrier())


def test_bad_transfers():
    comms = ep_comm.threads(SMALL, timeout=20)  # all of them: one that nobody holds is closed
    comm = comms[1]
    data = torch.zeros(4, dtype=torch.uint8)
    for transfer, name in [
        (Transfer(-1, 0, 1, data), "tag"),
        (Transfer(1, 4, 1, data), "source"),
        (Transfer(1, 1, -1, data), "target"),
        (Transfer(1, 0, 2, data), "transfers"),
        (Transfer(1, 1, 1, data), "transfers"),
        (Transfer(1, 0, 1, data.float()), "buffer"),
        (Transfer(1, 0, 1, torch.zeros(8, dtype=torch.uint8)[::2]), "buffer"),
    ]:
        with pytest.raises(ValueError, match=name):
            comm.move([transfer])
    comm.move([Transfer(1, 0, 1, data)])
    with pytest.raises(ValueError, match="tag"):
        comm.move([Transfer(1, 0, 1, data)])


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_peer_that_goes_ends_transfers(how):
    comms = ep_comm.threads(Shape(3, 1, 4, 1, 1), timeout=20)
    waiting = comms[1].move([Transfer(1, 0, 1, torch.zeros(8, dtype=torch.uint8))])
    fine = comms[1].move([Transfer(2, 2, 1, torch.zeros(8, dtype=torch.uint8))])
    comms[0].close() if how == "close" else comms[0].abort("no more")
    with pytest.raises(ep_comm.Broken, match=r"rank 0 (closed|aborted)"):
        waiting.wait(5)
    comms[2].move([Transfer(2, 2, 1, torch.ones(8, dtype=torch.uint8))]).wait(5)
    fine.wait(5)  # neither side of it has gone
    comms[1].close()
    other = comms[1]
    with pytest.raises(ep_comm.Broken):
        other.move([])


def test_what_was_sent_before_closing_arrives():
    comms = ep_comm.threads(Shape(2, 1, 4, 1, 1), timeout=20)
    data, target = _bytes(3, 2_000_000), torch.zeros(2_000_000, dtype=torch.uint8)

    def work(rank):
        moving = comms[rank].move([Transfer(1, 0, 1, data if rank == 0 else target)])
        moving.wait()
        comms[rank].close()

    assert on_threads(2, work) == [None, None]
    assert torch.equal(target, data)


def test_closing_ends_own_transfers():
    comms = ep_comm.threads(Shape(2, 1, 4, 1, 1), timeout=20)
    moving = comms[0].move([Transfer(1, 0, 1, torch.zeros(8, dtype=torch.uint8))])
    comms[0].close()
    with pytest.raises(ep_comm.Broken, match="closed"):
        moving.done()
