"""The loader on the CPU: bytes, futures, refusals, both race directions, failures."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from gdr_swapin import V41, BlockLayout, Busy, HostArena, Loader, Options, PagedPools, SourceLayer, SwapInError
from gdr_swapin.threads import ThreadsEngine, copy_pieces


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_arrive_and_nothing_else_changes(layout, filled, expected, pools_of, bytes_of, threads):
    arena, pools = filled(layout, 20), pools_of(layout, 16)
    slots, blocks = [4, 4, 19, 0, 5, 6, 7], [3, 9, 15, 1, 12, 11, 10]
    with Loader(arena, pools, options=Options(threads=threads)) as loader:
        transfer = loader.start(slots, torch.tensor(blocks))
        for layer in transfer.layers:
            transfer.wait_layer(layer, timeout=10)
            assert transfer.done(layer)
        transfer.wait(10)
        assert transfer.ended and loader.in_flight == 0 and transfer.failures() == {}
    assert torch.equal(bytes_of(pools), expected(arena, 16, slots, blocks))


def test_nothing_to_load(small, filled, pools_of):
    arena, pools = filled(small, 2), pools_of(small, 4)
    with Loader(arena, pools) as loader:
        transfer = loader.start([], [])
        transfer.wait(1)
        assert transfer.done(small.numbers[-1]) and loader.in_flight == 0


class Gated:
    """Copies that wait: each takes one permit."""

    def __init__(self, fail_at=None):
        self.permits, self.count, self.fail_at = threading.Semaphore(0), 0, fail_at

    def __call__(self, copies):
        assert self.permits.acquire(timeout=10)
        self.count += 1
        if self.count == self.fail_at:
            raise OSError("the memory is gone")
        copy_pieces(copies)


def gated(arena, pools, fail_at=None, **options):
    gate = Gated(fail_at)
    engine = ThreadsEngine(arena, pools, threads=1, copy=gate, **options)
    return gate, Loader(arena, pools, engine=engine, options=Options(most_in_flight=2))


def test_layers_come_in_deadline_order(small, filled, pools_of):
    arena, pools = filled(small, 3), pools_of(small, 3)
    gate, loader = gated(arena, pools)
    with loader:
        transfer = loader.start([2, 1], [1, 2])
        woken = []
        for layer in transfer.layers:
            transfer.future(layer).add_done_callback(lambda _, layer=layer: woken.append(layer))
        for position, layer in enumerate(transfer.layers):
            with pytest.raises(TimeoutError, match=f"layer {layer} has not arrived"):
                transfer.wait_layer(layer, timeout=0.01)
            gate.permits.release()
            transfer.wait_layer(layer, timeout=10)
            assert all((pools.main[i] == 0xEE).all() for i in range(position + 1, len(small.layers)))
        transfer.wait(10)
        assert woken == list(small.numbers)


def test_a_failed_layer_is_reported_and_the_rest_with_it(small, filled, pools_of, expected, bytes_of):
    arena, pools = filled(small, 3), pools_of(small, 3)
    gate, loader = gated(arena, pools, fail_at=2)
    with loader:
        transfer = loader.start([2], [1])
        gate.permits.release(10)
        with pytest.raises(SwapInError, match="layer 3 was not loaded: OSError: the memory is gone") as caught:
            transfer.wait(10)
        assert caught.value.layer == 3
        assert transfer.done(1) and not transfer.done(3) and not transfer.done(5)
        assert list(transfer.failures()) == [3, 5] and "layer 3 failed before it" in transfer.failures()[5]
        with pytest.raises(SwapInError):
            transfer.wait_layer(5, timeout=1)
        loader.start([2], [1]).wait(10)
    assert torch.equal(bytes_of(pools), expected(arena, 3, [2], [1]))


def test_overload_is_refused(small, filled, pools_of):
    arena, pools = filled(small, 6), pools_of(small, 6)
    gate, loader = gated(arena, pools)
    with loader:
        first = [loader.start([i], [i + 1]) for i in range(2)]
        with pytest.raises(Busy, match="2 transfers in flight, allowed are 2"):
            loader.start([4], [5])
        gate.permits.release(100)
        for transfer in first:
            transfer.wait(10)
        loader.start([4], [5]).wait(10)


def test_blocks_and_slots_are_held_until_the_end(small, filled, pools_of):
    arena, pools = filled(small, 6), pools_of(small, 6)
    gate, loader = gated(arena, pools)
    with loader:
        transfer = loader.start([1, 3], [2, 4])
        with pytest.raises(ValueError, match=r"blocks: got \[4\] of a transfer in flight"):
            loader.start([0, 5], [1, 4])
        with pytest.raises(ValueError, match=r"leased slots \[3\]"):
            arena.begin_write([3])
        other = loader.start([3], [5])  # two may read one slot
        gate.permits.release(100)
        transfer.wait(10), other.wait(10)
        arena.begin_write([3])
        with pytest.raises(ValueError, match=r"slots \[3\] that are not written"):
            loader.start([3], [2])
        assert loader.in_flight == 0


def test_old_users_finish_before_their_blocks_are_overwritten(small, filled, pools_of):
    """A slow reader of a page, with and without the ordering: only without it the page changes under the reader."""
    torn = {}
    for ordered in (True, False):
        arena, pools = filled(small, 3), pools_of(small, 3)
        over, entered = threading.Event(), threading.Event()
        seen = []

        def read(pools=pools, seen=seen, over=over, entered=entered):
            seen.append(pools.main[0][1].clone())
            entered.set()
            assert over.wait(10)
            seen.append(pools.main[0][1].clone())

        reader: Future[None] = Future()
        thread = threading.Thread(target=lambda read=read, reader=reader: reader.set_result(read()))
        thread.start()
        assert entered.wait(10)
        with Loader(arena, pools) as loader:
            transfer = loader.start([2], [1], after=reader if ordered else ())
            if not ordered:
                transfer.wait(10)
            over.set()
            transfer.wait(10)
        thread.join()
        torn[ordered] = not torch.equal(seen[0], seen[1])
        assert torch.equal(pools.gather([1])[0], arena.data[2])
    assert torn == {True: False, False: True}


def test_blocks_are_written_before_they_are_read(small, filled, pools_of):
    stale = {}
    for ordered in (True, False):
        arena, pools = filled(small, 3), pools_of(small, 3)
        gate, loader = gated(arena, pools)
        with loader:
            transfer = loader.start([2], [1])
            if ordered:
                gate.permits.release(1)
                transfer.wait_layer(1, timeout=10)
            stale[ordered] = not torch.equal(pools.index[0][1], arena.data[2, : small.layers[0].index_bytes])
            gate.permits.release(100)
            transfer.wait(10)
    assert stale == {True: False, False: True}


def test_a_slot_is_not_refilled_while_it_is_read(small, filled, pools_of):
    """The writer asks the arena first. The control writes past it, and the page mixes two blocks."""
    mixed = {}
    for ordered in (True, False):
        arena, pools = filled(small, 3), pools_of(small, 3)
        old, new = arena.data[2].clone(), torch.full((small.block_bytes,), 0x11, dtype=torch.uint8)
        gate, loader = gated(arena, pools)
        with loader:
            transfer = loader.start([2], [1])
            gate.permits.release(1)
            transfer.wait_layer(1, timeout=10)
            if ordered:
                with pytest.raises(ValueError, match="leased"):
                    arena.begin_write([2])
            else:
                arena.data[2] = new
            gate.permits.release(100)
            transfer.wait(10)
        mixed[ordered] = not torch.equal(pools.gather([1])[0], old)
    assert mixed == {True: False, False: True}


def test_fences(small, filled, pools_of, bytes_of):
    arena, pools = filled(small, 3), pools_of(small, 3)
    before = bytes_of(pools)
    broken: Future[None] = Future()
    broken.set_exception(RuntimeError("the step failed"))
    with Loader(arena, pools, engine=ThreadsEngine(arena, pools, fence_s=0.02)) as loader:
        for fence, words in (
            (broken, "layer 1 .*RuntimeError: the step failed"),
            (threading.Event(), r"not over after 0\.02 s"),
            (lambda timeout: False, r"not over after 0\.02 s"),
        ):
            with pytest.raises(SwapInError, match=words):
                loader.start([1], [1], after=fence).wait(10)
        assert torch.equal(bytes_of(pools), before)
        loader.start([1], [1], after=[lambda timeout: None, lambda timeout: True]).wait(10)
        with pytest.raises(ValueError, match="after: got str"):
            loader.start([1], [1], after=["x"])


def test_the_way_back(small, filled, pools_of):
    arena, pools = HostArena.allocate(small, 5), pools_of(small, 4)
    for i, tensor in enumerate((*pools.main, *pools.index)):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(i)))
    gate, loader = gated(arena, pools)
    with loader:
        transfer = loader.store([3, 1], [0, 4])
        with pytest.raises(ValueError, match="not written"):
            loader.start([4], [2])
        gate.permits.release(100)
        transfer.wait(10)
        assert torch.equal(arena.data[[0, 4]], pools.gather([3, 1]))
        loader.start([4], [2]).wait(10)
        assert torch.equal(pools.gather([2]), pools.gather([1]))
        with pytest.raises(ValueError, match=r"slots: got \[2\] more than once"):
            loader.store([1, 2], [2, 2])
    gate, loader = gated(arena, pools, fail_at=3)
    with loader:
        gate.permits.release(100)
        with pytest.raises(SwapInError):
            loader.store([1], [2]).wait(10)
        assert arena.state(2) == 0


@pytest.mark.parametrize(
    ("slots", "blocks", "words"),
    [
        ([0], [0], r"blocks: got \[0\], allowed is 1 to 5"),
        ([0], [6], r"blocks: got \[6\]"),
        ([4], [1], r"slots: got \[4\], allowed is 0 to 3"),
        ([-1], [1], r"slots: got \[-1\]"),
        ([0, 1], [2, 2], r"blocks: got \[2\] more than once"),
        ([0, 1], [2], "slots: got 2 ids, allowed is 1"),
        ([0.5], [1], "slots: got float64"),
        ([3], [1], r"slots: got slots \[3\] that are not written"),
    ],
)
def test_bad_ids_are_refused_before_anything_is_queued(small, pools_of, bytes_of, slots, blocks, words):
    arena, pools = HostArena.allocate(small, 4), pools_of(small, 6)
    with arena.writing([0, 1, 2]) as data:
        data[:3] = 1
    before = bytes_of(pools)
    gate, loader = gated(arena, pools)
    gate.permits.release(100)
    with loader:
        with pytest.raises(ValueError, match=words):
            loader.start(slots, blocks)
        assert loader.in_flight == 0
        arena.begin_write([0, 1, 2])  # no lease is left
    assert gate.count == 0 and torch.equal(bytes_of(pools), before)


def test_bad_loaders(small, filled):
    arena, pools = filled(small, 2), PagedPools.allocate(small, 3)
    with pytest.raises(ValueError, match="pools: got layout"):
        Loader(filled(V41, 2), pools)
    with pytest.raises(ValueError, match="method: got 'rdma'"):
        Loader(arena, pools, "rdma")
    with pytest.raises(ValueError, match=r"method: got 'gather'.*on the host"):
        Loader(arena, pools, "gather")
    with pytest.raises(NotImplementedError, match="'meta'"):
        Loader(arena, _meta(pools))
    loader = Loader(arena, pools)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="loader: got a closed one"):
        loader.start([0], [1])


def _meta(pools):
    class Elsewhere:
        layout, num_blocks, device = pools.layout, pools.num_blocks, torch.device("meta")

    return Elsewhere()


def test_bad_pools(small):
    good = PagedPools.allocate(small, 3)

    def with_main(i, tensor):
        return tuple(tensor if j == i else t for j, t in enumerate(good.main))

    for main, words in (
        (good.main[:2], "main: got 2 tensors"),
        (with_main(1, good.main[1][:2]), r"main\[1\]: got shape"),
        (with_main(2, good.main[2].int()), r"main\[2\]: got dtype"),
        (with_main(1, good.main[1].transpose(1, 2).contiguous().transpose(1, 2)), r"main\[1\]: got strides"),
        (
            with_main(0, torch.zeros(good.main[0].numel() + 8, dtype=torch.uint8)[8:].view_as(good.main[0])),
            r"main\[0\]",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            PagedPools(small, main, good.index)
    with pytest.raises(ValueError, match="num_blocks: got 1"):
        PagedPools.allocate(small, 1)


def test_a_layer_that_is_none(filled, pools_of):
    layout = BlockLayout((SourceLayer(4, 8),))
    arena, pools = filled(layout, 2), pools_of(layout, 2)
    with Loader(arena, pools) as loader:
        transfer = loader.start([0], [1])
        for call in (transfer.wait_layer, transfer.done, transfer.future):
            with pytest.raises(ValueError, match=r"layer: got 2, allowed is one of \[4\]"):
                call(2)
        with pytest.raises(ValueError, match="stream: got 7"):
            transfer.wait_layer(4, stream=7)
        transfer.wait(10)
