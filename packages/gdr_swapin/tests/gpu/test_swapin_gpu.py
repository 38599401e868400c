"""On an NVIDIA GPU: every way against the reference, both race directions with their controls, registered memory."""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest
import torch

from gdr_swapin import V41, Busy, HostArena, Loader, Options, PagedPools, SwapInError, reference, region_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WAYS = {
    "copy": ("copy", {}),
    "copy, one stream, one call a piece": ("copy", {"streams": 1, "batched": False}),
    "copy, four streams, one call a piece": ("copy", {"streams": 4, "batched": False}),
    "copy, any order": ("copy", {"any_order": True, "prefer_overlap": False, "pieces_a_call": 256}),
    "stage": ("stage", {"staging_bytes": 4 << 20}),
    "copy, paired": ("copy", {"paired": True}),
    "stage, four streams, small calls": ("stage", {"streams": 4, "pieces_a_call": 3, "first_blocks": 1}),
    "stage, by layer": ("stage", {"order": "layer", "staging_bytes": 4 << 20}),
    "mixed": ("mixed", {"gather_share": 0.3, "ctas": 2, "order": "first"}),
    "stage, whole blocks": ("stage", {"order": "block", "staging_bytes": 4 << 20, "streams": 3, "staging_parts": 3}),
    "stage, first layer first": ("stage", {"order": "first", "staging_bytes": 1 << 20}),
    "stage, plain scatter": ("stage", {"staging_bytes": 1 << 20, "scatter_loads": 8, "scatter_ctas": 40}),
    "gather": ("gather", {}),
    "gather, small ring": ("gather", {"ctas": 3, "stages": 4, "piece_bytes": 4096}),
    "gather, large pieces": ("gather", {"stages": 9, "piece_bytes": 22784}),
    "gather, one launch": ("gather", {"one_launch": True}),
    "gather, one launch, three CTAs": ("gather", {"one_launch": True, "ctas": 3, "stages": 5, "piece_bytes": 11520}),
    "gather, one launch, first layer first": ("gather", {"one_launch": True, "gather_order": "first"}),
    "gather, one launch, whole blocks, read once": (
        "gather",
        {"one_launch": True, "gather_order": "block", "stream_once": True},
    ),
    "stage, a gathered lead": ("stage", {"order": "lead", "lead_from": 2, "staging_bytes": 4 << 20}),
    "gather_plain": ("gather_plain", {}),
    "gather_plain, many loads": ("gather_plain", {"ctas": 32, "loads": 8}),
}
way = pytest.mark.parametrize("way", WAYS)
SLOTS = 192


@pytest.fixture(scope="module")
def arena() -> HostArena:
    made = HostArena.allocate(V41, SLOTS, pinned=True)
    with made.writing(range(SLOTS)) as data:
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    return made


def loader_of(way, arena, pools):
    method, options = WAYS[way]
    return Loader(arena, pools, method, options=Options(**options))


def poisoned(num_blocks=SLOTS + 1):
    pools = PagedPools.allocate(V41, num_blocks, "cuda")
    for tensor in (*pools.main, *pools.index):
        tensor.fill_(0xEE)
    return pools


def scattered(n, seed=0):
    g = np.random.default_rng(seed)
    return g.permutation(SLOTS)[:n], g.permutation(SLOTS)[:n] + 1


def everything(pools):
    return pools.gather(range(pools.num_blocks))


@way
@pytest.mark.parametrize("n", [1, 3, 100])
def test_scattered_blocks(arena, way, n):
    pools, wanted = poisoned(), poisoned()
    slots, blocks = scattered(n, n)
    with loader_of(way, arena, pools) as loader:
        for _ in range(3):
            transfer = loader.start(slots, blocks)
            transfer.wait_layer(20)
            got = everything(pools)
            transfer.wait(20)
            assert all(transfer.done(layer) for layer in V41.numbers)
    reference.load_blocks(arena.data, slots.tolist(), wanted, blocks.tolist())
    assert torch.equal(got, everything(wanted))


@way
def test_neighbours(arena, way):
    """Runs of ids on one side or both, which become large or strided copies."""
    pools, wanted = poisoned(), poisoned()
    slots = [*range(20, 60), *range(100, 109), 3, *range(70, 90)]
    blocks = [*range(1, 41), *range(100, 91, -1), 55, *range(150, 170)]
    with loader_of(way, arena, pools) as loader:
        loader.start(slots, blocks).wait_layer(20)
        got = everything(pools)
    reference.load_blocks(arena.data, slots, wanted, blocks)
    assert torch.equal(got, everything(wanted))


@way
def test_a_layers_event_is_enough_for_its_rows(arena, way):
    pools = poisoned()
    slots, blocks = scattered(150, 5)
    ids = torch.from_numpy(blocks).cuda()
    with loader_of(way, arena, pools) as loader:
        for _ in range(5):
            for tensor in (*pools.main, *pools.index):
                tensor.fill_(0xEE)
            transfer = loader.start(slots, blocks)
            seen = []
            for i, layer in enumerate(V41.numbers):
                transfer.wait_layer(layer)
                seen.append((pools.index[i][ids], pools.main[i][ids]))
            transfer.wait(20)
            for (index, main), source, offset in zip(seen, V41.layers, V41.offsets, strict=True):
                rows = arena.data[torch.from_numpy(slots), offset : offset + source.slice_bytes].cuda()
                assert torch.equal(torch.cat((index, main.flatten(1)), 1), rows)


@way
def test_old_users_finish_before_their_blocks_are_overwritten(arena, way):
    """A reader that is still at work on the current stream. The control, without its fence, reads new bytes."""
    pools = poisoned()
    slots, blocks = scattered(100, 6)
    ids = torch.from_numpy(blocks).cuda()
    with loader_of(way, arena, pools) as loader:
        torn = {}
        for ordered in (True, False):
            for tensor in (*pools.main, *pools.index):
                tensor.fill_(0xEE)
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # some 50 ms
            seen = pools.main[0][ids]
            transfer = loader.start(slots, blocks, after=None if ordered else ())
            transfer.wait(20)
            torn[ordered] = not bool((seen == 0xEE).all())
    assert torn == {True: False, False: True}


@way
def test_blocks_are_written_before_they_are_read(arena, way):
    """A transfer that is held up; who does not wait for the layer reads old bytes.

    Streams may share a hardware queue, so one of four readers has to be early in the control, and none otherwise.
    """
    pools = poisoned()
    slots, blocks = scattered(100, 7)
    ids = torch.from_numpy(blocks).cuda()
    offset = V41.offsets[-1] + V41.layers[-1].index_bytes
    wanted = arena.data[torch.from_numpy(slots), offset : offset + V41.layers[-1].main_bytes].cuda()
    slow, readers = torch.cuda.Stream(), [torch.cuda.Stream(priority=-(i % 2)) for i in range(4)]
    with loader_of(way, arena, pools) as loader:
        early, late = {}, {}
        for ordered in (True, False):
            for tensor in (*pools.main, *pools.index):
                tensor.fill_(0xEE)
            torch.cuda.synchronize()
            with torch.cuda.stream(slow):
                torch.cuda._sleep(100_000_000)
            transfer = loader.start(slots, blocks, after=slow)
            seen = []
            for reader in readers:
                with torch.cuda.stream(reader):
                    if ordered:
                        transfer.wait_layer(20)
                    seen.append(pools.main[-1][ids].flatten(1))
            torch.cuda.synchronize()
            transfer.wait(20)
            early[ordered] = sum(bool((rows == 0xEE).all()) for rows in seen)
            late[ordered] = sum(torch.equal(rows, wanted) for rows in seen)
    assert (early[True], late[True]) == (0, 4)
    assert early[False] > 0


@way
def test_transfers_one_after_the_other_without_waiting(arena, way):
    """Descriptors and the staging area are used again while earlier transfers are on their way."""
    pools, wanted = poisoned(), poisoned()
    with loader_of(way, arena, pools) as loader:
        for turn in range(5):
            order = np.random.default_rng(turn)
            slots, blocks = order.permutation(SLOTS)[:160], order.permutation(SLOTS)[:160] + 1
            parts = np.array_split(np.arange(160), 4)
            transfers = [loader.start(slots[part], blocks[part]) for part in parts]
            reference.load_blocks(arena.data, slots.tolist(), wanted, blocks.tolist())
            for transfer in transfers:
                transfer.wait(20)
    assert torch.equal(everything(pools), everything(wanted))


def test_overload_and_held_blocks(arena):
    pools, slow = poisoned(), torch.cuda.Stream()
    with Loader(arena, pools, "copy", options=Options(most_in_flight=2)) as loader:
        with torch.cuda.stream(slow):
            torch.cuda._sleep(200_000_000)
        first = loader.start([1], [1], after=slow)
        with pytest.raises(ValueError, match=r"blocks: got \[1\] of a transfer in flight"):
            loader.start([2], [1])
        second = loader.start([2], [2], after=slow)
        with pytest.raises(Busy):
            loader.start([3], [3])
        with pytest.raises(ValueError, match="leased"):
            arena.begin_write([2])
        first.wait(20), second.wait(20)
        loader.start([3], [3]).wait(20)


def test_the_way_back(arena):
    pools = poisoned()
    slots, blocks = scattered(90, 8)
    target = HostArena.allocate(V41, SLOTS, pinned=True)
    with Loader(arena, pools, "copy") as loader:
        loader.start(slots, blocks).wait_layer(20)
        with Loader(target, pools, "copy") as storer:
            storer.store(blocks, slots).wait(20)  # behind the current stream, which waited for the load
    assert torch.equal(target.data[torch.from_numpy(slots)], arena.data[torch.from_numpy(slots)])
    with Loader(arena, pools, "gather") as loader, pytest.raises(NotImplementedError, match="store"):
        loader.store([1], [0])


@pytest.mark.parametrize("method", ["copy", "stage", "gather", "gather_plain"])
@pytest.mark.parametrize("whole", [True, False])
def test_registered_memory_of_somebody_else(arena, method, whole):
    """Anonymous shared pages, with our header or with blocks a number of pages apart."""
    stride, n = 28 * 4096, 12
    memory = mmap.mmap(-1, region_bytes(V41, n) if whole else 4096 + n * stride)
    if whole:
        mine = HostArena.over(V41, memory, n, create=True)
    else:
        mine = HostArena.foreign(V41, memory, n, offset=4096 + 128, stride=stride)
    pools = poisoned(20)
    with pytest.raises(ValueError, match="arena: got memory that is not pinned"):
        Loader(mine, pools, method)
    if whole:
        with mine.writing(range(n)) as data:
            data.copy_(arena.data[:n])
    else:
        mine.data.copy_(arena.data[:n])
    mine.register()
    try:
        with Loader(mine, pools, method) as loader:
            loader.start(range(n), range(3, 3 + n)).wait(20)
            loader.start([1], [1]).wait(20)
        assert torch.equal(pools.gather(range(3, 3 + n)).cpu(), arena.data[:n])
    finally:
        mine.unregister()


def test_wild_numbers_do_not_reach_the_device(arena):
    from gdr_swapin import _cuda

    table = np.array([[0, 16, 16, arena.data.data_ptr(), arena.data.data_ptr()]], dtype=np.uint64)
    good = {"source": arena.data.data_ptr(), "stride": 64, "slots": 0, "blocks": arena.data.data_ptr(), "count": 0,
            "piece": 32, "layers": table.ctypes.data, "layer_count": 1, "ctas": 1,
            "stream": torch.cuda.current_stream().cuda_stream}  # fmt: skip
    bulk = {"stages": 4, "group_ends": 0, "done": 0, "stream_once": False}
    _cuda.move_bulk(**good, **bulk)
    wrongs = [{"piece": 8}, {"stride": 24}, {"stride": 16}, {"ctas": 0}, {"ctas": 5000}, {"layer_count": 0},
              {"count": -1}, {"source": 0}, {"source": 8}, {"blocks": 0}]  # fmt: skip
    for wrong, (call, last) in itertools.product(wrongs, ((_cuda.move_bulk, bulk), (_cuda.move_plain, {"loads": 1}))):
        with pytest.raises(ValueError):
            call(**{**good, **wrong}, **last)
    engine = Loader(arena, poisoned(), "stage").engine
    ids = np.arange(8)
    stage = {**engine._fixed, **engine._ring.arguments(2), "slots": ids.ctypes.data, "count": 0, "offset": 0,
             "size": V41.block_bytes, "ids": arena.data.data_ptr(), "layers": engine._parts.table.ctypes.data,
             "layer_count": 4}  # fmt: skip
    assert _cuda.stage(**stage) == 0
    wrongs = [{"per_call": 257}, {"per_call": 0}, {"part": 8}, {"turn": 2}, {"parts": 1}, {"size": 1 << 30},
              {"first": 0}, {"slots": 0}, {"emptied": 0}, {"offset": 16}, {"ids": 0}, {"layer_count": 9}]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ValueError):
            _cuda.stage(**{**stage, **wrong})
    engine.close()
    for stages in (3, 65):
        with pytest.raises(ValueError):
            _cuda.move_bulk(**good, **{**bulk, "stages": stages})
    with pytest.raises(ValueError):
        _cuda.move_plain(**good, loads=2)
    torch.cuda.synchronize()


def test_a_call_that_the_driver_refuses_fails_its_layer(arena):
    """The second layer's call raises: the first layer arrives, no event says that the others did."""
    pools = poisoned()
    with Loader(arena, pools, "copy", options=Options(regular_from=0)) as loader:
        engine, calls = loader.engine, []
        plain = engine.copy

        def copy(copies, stream, *, store=False):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            plain(copies, stream, store=store)

        engine.copy = copy
        transfer = loader.start([1, 5], [2, 9])
        transfer.wait_layer(2)
        with pytest.raises(SwapInError, match="layer 8 was not loaded"):
            transfer.wait_layer(8)
        with pytest.raises(SwapInError):
            transfer.wait(20)
        assert transfer.done(2) and list(transfer.failures()) == [8, 14, 20]
        engine.copy = plain
        loader.start([1, 5], [2, 9]).wait(20)
        assert torch.equal(pools.gather([2, 9]).cpu(), arena.data[[1, 5]])
