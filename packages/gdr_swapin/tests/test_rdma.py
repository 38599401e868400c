"""The loopback path on a simulated queue: what every fault does to a transfer, and what never happens."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdr_swapin import Busy, Loader, SwapInError
from gdr_swapin.plan import Copies
from gdr_swapin.rdma import (
    Completion,
    Fault,
    LayerLedger,
    RdmaEngine,
    SimulatedQueue,
    Status,
    WorkRequest,
    open_queue_pair,
)


def loader_of(arena, pools, queue, **options):
    options = {"timeout_s": 0.02, **options}
    return Loader(arena, pools, engine=RdmaEngine(arena, pools, queue, **options))


def requests_of(layout, blocks):
    """Number of the first request of each layer, two requests a block and layer."""
    return [2 * blocks * i for i in range(len(layout.layers))]


@pytest.mark.parametrize("depth", [1, 7, 64])
def test_blocks_arrive_out_of_order(layout, filled, expected, pools_of, bytes_of, depth):
    for seed in range(4):
        arena, pools = filled(layout, 12, seed), pools_of(layout, 12)
        queue = SimulatedQueue(seed=seed, depth=depth, window=8)
        slots, blocks = [3, 9, 0, 11, 5, 2], [1, 7, 11, 3, 2, 10]
        with loader_of(arena, pools, queue) as loader:
            loader.start(slots, blocks).wait(10)
            loader.start([1], [4]).wait(10)
        assert torch.equal(bytes_of(pools), expected(arena, 12, [*slots, 1], [*blocks, 4]))
        assert queue.peak <= depth and queue.resets == 0
        assert depth == 1 or queue.order != sorted(queue.order)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault.SHORT, r"request \d+ moved \d+ of \d+ bytes"),
        (Fault.ERROR, r"request \d+ ended with (error|flushed)"),
        (Fault.LOST, r"no completion for 0\.02 s"),
        (Fault.LATE, r"no completion for 0\.02 s"),
        (Fault.FOREIGN, r"a completion of request \d+, which was not posted"),
        (Fault.REFUSED, "OSError: the card refused the request"),
    ],
)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failed_layer_is_reported(small, filled, expected, pools_of, bytes_of, fault, words, layer):
    blocks = 5
    for seed, offset in ((0, 0), (1, 3), (2, 2 * blocks - 1)):
        arena, pools = filled(small, 8, seed), pools_of(small, 8)
        number = requests_of(small, blocks)[layer] + offset
        queue = SimulatedQueue(seed=seed, depth=16, window=4, faults={number: fault})
        with loader_of(arena, pools, queue) as loader:
            transfer = loader.start(range(blocks), range(1, blocks + 1))
            with pytest.raises(SwapInError, match=words):
                transfer.wait(10)
            failed = list(transfer.failures())
            # A refused or foreign request may take layers before its own with it, never one after it alone.
            assert failed == list(small.numbers[small.numbers.index(failed[0]) :])
            assert small.numbers.index(failed[0]) <= layer
            if fault in (Fault.SHORT, Fault.LOST, Fault.LATE):
                assert failed[0] == small.numbers[layer]
            for position, number_of in enumerate(small.numbers):
                if transfer.done(number_of):  # what counts as arrived is there, whole
                    end = small.offsets[position] + small.layers[position].slice_bytes
                    start = small.offsets[position]
                    assert torch.equal(pools.gather(range(1, 6))[:, start:end], arena.data[:5, start:end])
            assert queue.resets >= 1
            loader.start(range(7), range(1, 8)).wait(10)  # the loader goes on
        assert torch.equal(bytes_of(pools), expected(arena, 8, range(7), range(1, 8)))


def test_duplicates_count_once(small, filled, expected, pools_of, bytes_of):
    """With the completion of a layer's first request twice, its last one still has to come."""
    for number in range(0, 30, 3):
        arena, pools = filled(small, 8), pools_of(small, 8)
        queue = SimulatedQueue(seed=number, faults={number: Fault.DUPLICATE, number + 1: Fault.DUPLICATE})
        with loader_of(arena, pools, queue) as loader:
            loader.start(range(5), range(1, 6)).wait(10)
            loader.start([7], [7]).wait(10)
        assert torch.equal(bytes_of(pools), expected(arena, 8, [*range(5), 7], [*range(1, 6), 7]))


def test_a_late_request_cannot_write_blocks_of_the_next_user(small, filled, expected, pools_of, bytes_of):
    """The queue is reset before the blocks are given back; the control, a reset that does nothing, goes wrong."""

    class Careless(SimulatedQueue):
        def reset(self) -> None:
            self.resets += 1

    wrong = {}
    for kind in (SimulatedQueue, Careless):
        arena, pools = filled(small, 8), pools_of(small, 8)
        queue = kind(faults={1: Fault.LATE}, window=1)
        with loader_of(arena, pools, queue) as loader:
            with pytest.raises(SwapInError):
                loader.start([0], [1]).wait(10)
            loader.start([5], [1]).wait(10)
            queue.release_late()
        wrong[kind] = not torch.equal(bytes_of(pools), expected(arena, 8, [5], [1]))
    assert wrong == {SimulatedQueue: False, Careless: True}


def test_nothing_is_posted_before_the_fences(small, filled, pools_of):
    """The card knows no streams: who still reads a block holds the whole transfer back."""
    for ordered in (True, False):
        arena, pools = filled(small, 4), pools_of(small, 4)
        gate, queue = threading.Event(), SimulatedQueue()
        with loader_of(arena, pools, queue) as loader:
            transfer = loader.start([0], [1], after=gate if ordered else ())
            if not ordered:
                transfer.wait(10)
            untouched = bool((pools.main[0][1] == 0xEE).all())
            assert untouched is ordered
            assert bool(queue.order) is not ordered
            gate.set()
            transfer.wait(10)


def test_a_fence_that_fails_or_never_ends(small, filled, pools_of, bytes_of):
    arena, pools = filled(small, 4), pools_of(small, 4)
    before = bytes_of(pools)
    queue = SimulatedQueue()
    with loader_of(arena, pools, queue, fence_s=0.01) as loader:
        transfer = loader.start([0], [1], after=threading.Event())
        with pytest.raises(SwapInError, match=r"a user of the blocks was not over after 0\.01 s"):
            transfer.wait(10)
    assert torch.equal(bytes_of(pools), before) and not queue.order


def test_the_way_back(small, filled, pools_of):
    arena, pools = filled(small, 6), pools_of(small, 6)
    with loader_of(arena, pools, SimulatedQueue(seed=2)) as loader:
        loader.store([1, 3], [4, 0]).wait(10)
        assert torch.equal(arena.data[[4, 0]], pools.gather([1, 3]))
    queue = SimulatedQueue(faults={2: Fault.SHORT})
    with loader_of(arena, pools, queue) as loader:
        with pytest.raises(SwapInError):
            loader.store([1, 3], [4, 0]).wait(10)
        with pytest.raises(ValueError, match=r"slots: got slots \[.*\] that are not written"):
            loader.start([4], [2])  # half a block is no block


def test_the_queue_refuses_what_does_not_fit():
    queue = SimulatedQueue(depth=2)
    with pytest.raises(Busy, match="3 requests, the queue takes 2"):
        queue.post([WorkRequest(i, 0, 0, 0) for i in range(3)])
    assert queue.poll(8) == []
    with pytest.raises(ValueError, match="depth: got 0"):
        SimulatedQueue(depth=0)


def test_no_card_is_driven():
    with pytest.raises(NotImplementedError, match="no implementation for card 'mlx5_0'"):
        open_queue_pair("mlx5_0")


def copies(n):
    return Copies(*(np.arange(1, n + 1, dtype=np.uint64) * 64 for _ in range(2)), np.full(n, 64, dtype=np.uint64))


@given(
    layers=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    draws=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(["ok", "ok", "ok", "again", "short", "error"])), max_size=60
    ),
    room=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_the_ledger_never_calls_a_layer_arrived_too_early(layers, draws, room):
    """Against a plain count: a layer has arrived exactly when it and all before it completed whole, once each."""
    ledger = LayerLedger([copies(n) for n in layers], 100)
    owner = [position for position, n in enumerate(layers) for _ in range(n)]
    posted, whole, spoiled = [], set(), set()
    posted += [r.id for r in ledger.to_post(room)]
    for pick, outcome in draws:
        live = [i for i in posted if i not in whole | spoiled]
        done = sorted(whole | spoiled)
        if outcome == "again" and done:
            ledger.complete(Completion(done[pick % len(done)], Status.SUCCESS, 64))
        elif live:
            chosen = live[pick % len(live)]
            bad = outcome in ("short", "error")
            (spoiled if bad else whole).add(chosen)
            status = Status.ERROR if outcome == "error" else Status.SUCCESS
            ledger.complete(Completion(chosen, status, 32 if bad else 64))
        posted += [r.id for r in ledger.to_post(room - ledger.outstanding)]
        assert ledger.outstanding <= room
        arrived = 0
        while arrived < len(layers) and all(i + 100 in whole for i, p in enumerate(owner) if p == arrived):
            arrived += 1
        assert ledger.arrived == arrived
        assert (ledger.failure is not None) == bool(spoiled)
        if spoiled:
            assert ledger.failure[0] == min(owner[i - 100] for i in spoiled)


def test_random_faults_never_yield_wrong_bytes(small, filled, pools_of):
    """200 transfers, one request in twenty with some fault: a layer that counts as arrived holds the right bytes."""
    rng = np.random.default_rng(7)
    faults = {int(i): list(Fault)[int(rng.integers(len(Fault)))] for i in np.flatnonzero(rng.random(9000) < 0.02)}
    arena, pools = filled(small, 30), pools_of(small, 30)
    queue = SimulatedQueue(seed=3, depth=12, window=6, faults=faults)
    ended = {"whole": 0, "failed": 0}
    with loader_of(arena, pools, queue, timeout_s=0.002) as loader:
        for _ in range(200):
            n = int(rng.integers(1, 8))
            slots, blocks = rng.permutation(30)[:n], rng.permutation(29)[:n] + 1
            before = pools.gather(range(30)).clone()
            transfer = loader.start(slots, blocks)
            try:
                transfer.wait(10)
            except SwapInError:
                ended["failed"] += 1
            else:
                ended["whole"] += 1
            after = pools.gather(range(30))
            others = np.setdiff1d(np.arange(30), blocks)
            assert torch.equal(after[others], before[others])
            for position, source in enumerate(small.layers):
                if transfer.done(source.layer):
                    start = small.offsets[position]
                    end = start + source.slice_bytes
                    assert torch.equal(after[blocks, start:end], arena.data[slots, start:end])
        assert loader.in_flight == 0
    assert min(ended.values()) > 20
