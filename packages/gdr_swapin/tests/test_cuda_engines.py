"""The GPU's engines on simulated streams: bytes, order, both race directions, failures."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from gdr_swapin import Busy, HostArena, Loader, Options, SwapInError
from gdr_swapin.cuda import make_engine
from kernel_core.testing.child import load_file

SimGpu = load_file(Path(__file__).parent / "sim_gpu.py").SimGpu
METHODS = ("copy", "stage", "mixed", "gather", "gather_plain")
SEEDS = range(6)


def loader_of(method, arena, pools, gpu, **options):
    options = Options(
        **{
            "staging_bytes": 1 << 13,
            "staging_parts": 2,
            "piece_bytes": 1024,
            "order": "layer",
            "gather_share": 0.4,
            **options,
        }
    )
    return Loader(arena, pools, engine=make_engine(method, arena, pools, options, gpu), options=options)


def permutation(seed, n, low=0):
    return (np.random.default_rng(seed).permutation(n) + low).tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", ["layer", "first", "block"])
def test_blocks_arrive_and_nothing_else_changes(method, order, layout, filled, expected, pools_of, bytes_of):
    if order != "layer" and method not in ("stage", "mixed"):
        pytest.skip("staging only")
    staging = 6 * layout.block_bytes + 64  # several rounds of the ring
    for seed in SEEDS:
        arena, pools = filled(layout, 24, seed), pools_of(layout, 20)
        slots, blocks = permutation(seed, 24)[:17], permutation(seed + 99, 19, 1)[:17]
        with loader_of(method, arena, pools, SimGpu(seed), order=order, staging_bytes=staging) as loader:
            loader.start(slots, blocks).wait(20)
        assert torch.equal(bytes_of(pools), expected(arena, 20, slots, blocks))
        assert torch.equal(pools.gather([0]), torch.full((1, layout.block_bytes), 0xEE, dtype=torch.uint8))


LEAD = {"order": "lead", "lead_from": 4, "staging_bytes": 1 << 20}
ONE = {"one_launch": True}
VARIANTS = {
    "one launch": ("gather", ONE),
    "one launch, first layer first": ("gather", {**ONE, "gather_order": "first"}),
    "one launch, whole blocks": ("gather", {**ONE, "gather_order": "block", "ctas": 1}),
    "lead": ("stage", LEAD),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_bring_the_same_bytes(variant, layout, filled, expected, pools_of, bytes_of):
    method, options = VARIANTS[variant]
    for seed in SEEDS:
        arena, pools = filled(layout, 24, seed), pools_of(layout, 20)
        with loader_of(method, arena, pools, SimGpu(seed), **options) as loader:
            for turn, count in enumerate((17, 2, 9)):  # counters go on; a lead only where it pays
                slots, blocks = permutation(seed + turn, 24)[:count], permutation(seed + 99 + turn, 19, 1)[:count]
                loader.start(slots, blocks).wait(20)
                assert torch.equal(pools.gather(blocks), arena.data[slots])
        assert torch.equal(pools.gather([0]), torch.full((1, layout.block_bytes), 0xEE, dtype=torch.uint8))


@pytest.mark.parametrize(("method", "options"), [("gather", ONE), ("stage", LEAD)])
def test_the_first_layer_is_there_before_the_rest(method, options, small, filled, pools_of):
    early = 0
    for seed in range(20):
        gpu = SimGpu(seed)
        arena, pools = filled(small, 12, seed), pools_of(small, 24)
        with loader_of(method, arena, pools, gpu, **options) as loader:
            for transfer in [loader.start(range(k, k + 5), range(12 + k, 17 + k)) for k in (0, 5)]:
                transfer.wait(20)  # counters stand where that left them
            gpu.held = True
            first, last = [loader.start(range(k, k + 5), range(1 + k, 6 + k)) for k in (0, 5)]
            seen, stream = [], gpu.stream()
            last.wait_layer(small.numbers[0], stream=stream)
            stream.push(
                lambda p=pools, s=seen: s.append((p.main[0][6:11].clone(), bool((p.main[-1][6:11] == 0xEE).all())))
            )
            with gpu.lock:
                gpu.held = False
                while not seen:
                    assert gpu.step()
            gpu.release()
            first.wait(20), last.wait(20)
            source = small.layers[0]
            wanted = arena.data[5:10, source.index_bytes : source.slice_bytes]
            assert torch.equal(seen[0][0].flatten(1), wanted)
            early += seen[0][1]
    assert early


@pytest.mark.parametrize("failing", ["move_bulk", "wait_value", "upload_ids"])
def test_one_launch_that_fails_in_part_is_told_and_survived(failing, small, filled, expected, pools_of, bytes_of):
    gpu = SimGpu(4)
    arena, pools = filled(small, 12), pools_of(small, 12)
    with loader_of("gather", arena, pools, gpu, **ONE) as loader:
        gpu.module.failing.add(failing)
        with pytest.raises(SwapInError, match=failing):
            loader.start(range(5), range(1, 6)).wait(20)
        gpu.module.failing.clear()
        for _ in range(6):
            loader.start(range(11), range(1, 12)).wait(20)
    assert torch.equal(bytes_of(pools), expected(arena, 12, list(range(11)), list(range(1, 12))))


def test_without_waits_for_memory_each_layer_has_a_launch(small, filled, pools_of):
    gpu = SimGpu(1, batch=False)
    arena, pools = filled(small, 12), pools_of(small, 12)
    with loader_of("gather", arena, pools, gpu, **ONE) as loader:
        loader.start(range(5), range(1, 6)).wait(20)
    assert len(gpu.module.named("move_bulk")) == len(small.layers) and not gpu.module.named("wait_value")


def test_mixed_takes_whole_blocks_for_lead(small, filled, expected, pools_of, bytes_of):
    arena, pools = filled(small, 12), pools_of(small, 12)
    with loader_of("mixed", arena, pools, SimGpu(2), **LEAD) as loader:
        loader.start(range(11), range(1, 12)).wait(20)
    assert torch.equal(bytes_of(pools), expected(arena, 12, list(range(11)), list(range(1, 12))))
    with pytest.raises(ValueError, match="gather_order: got 'lead'"):
        Options(gather_order="lead")


@pytest.mark.parametrize("method", ["copy", "stage"])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
def test_neighbours_become_strided_copies(method, batch, streams, small, filled, expected, pools_of, bytes_of):
    gpu = SimGpu(3, batch=batch)
    arena, pools = filled(small, 40), pools_of(small, 40)
    slots, blocks = [*range(5, 25), 30, 1, 33], [*range(7, 27), 2, 39, 4]
    if method == "copy" and batch:
        streams = 1
    options = {"regular_from": 8, "streams": streams, "staging_bytes": 1 << 17}
    with loader_of(method, arena, pools, gpu, **options) as loader:
        loader.start(slots, blocks).wait(20)
    assert torch.equal(bytes_of(pools), expected(arena, 40, slots, blocks))
    assert len(gpu.module.named("copy_rows")) >= 3
    other = gpu.module.named("copy_batch" if batch else "copy_each")
    assert other and not gpu.module.named("copy_each" if batch else "copy_batch")


@pytest.mark.parametrize("method", ["copy"])
def test_two_blocks_in_one_copy(method, layout, filled, expected, pools_of, bytes_of):
    for seed in SEEDS:
        gpu = SimGpu(seed)
        arena, pools = filled(layout, 60, seed), pools_of(layout, 60)
        slots, blocks = [*permutation(seed, 60)[:39], 7, 7], permutation(seed + 9, 59, 1)[:41]
        options = {"paired": True, "staging_bytes": 20 * layout.block_bytes, "pieces_a_call": 16}
        with loader_of(method, arena, pools, gpu, **options) as loader:
            loader.start(slots, blocks).wait(20)
        assert torch.equal(bytes_of(pools), expected(arena, 60, slots, blocks))
        commands = gpu.module.named("copy_strided"), gpu.module.named("copy_batch")
        pairs, alone = (sum(call["count"] for call in calls) for calls in commands)
        assert pairs > alone


@pytest.mark.parametrize(("batch", "streams"), [(True, 0), (False, 3)])
def test_copies_of_a_call_are_bounded_and_spread_over_streams(batch, streams, small, filled, pools_of):
    gpu = SimGpu(1, batch=batch)
    arena, pools = filled(small, 40), pools_of(small, 40)
    with loader_of("copy", arena, pools, gpu, pieces_a_call=8, streams=streams) as loader:
        loader.start(range(0, 40, 2), range(1, 21)).wait(20)
    calls = gpu.module.named("copy_batch" if batch else "copy_each")
    assert max(call["count"] for call in calls) == 8
    assert len({call["stream"] for call in calls}) == max(1, streams)


def test_batches_of_pieces_have_one_stream(small, filled, pools_of):
    arena, pools = filled(small, 4), pools_of(small, 4)
    with pytest.raises(ValueError, match="streams: got 2, allowed is 0 or 1 for batched copies"):
        loader_of("copy", arena, pools, SimGpu(), streams=2)
    for gpu, options in ((SimGpu(batch=False), {}), (SimGpu(), {"batched": False})):
        loader_of("copy", arena, pools, gpu, streams=2, **options).close()


@pytest.mark.parametrize("method", METHODS)
def test_deadline_order(method, layout, filled, pools_of):
    """Waiting for a layer is enough to read it, and a layer's event does not wait for later layers."""
    late = 0
    for seed in range(30 if layout.block_bytes < 10_000 else 6):
        gpu = SimGpu(seed)
        arena, pools = filled(layout, 12, seed), pools_of(layout, 12)
        options = {"staging_bytes": 4 * layout.block_bytes + 4096}
        with loader_of(method, arena, pools, gpu, **options) as loader:
            gpu.held = True
            transfer = loader.start(range(12 - 1), range(1, 12))
            for position, layer in enumerate(layout.numbers):
                stream, seen = gpu.stream(), []
                transfer.wait_layer(layer, stream=stream)
                read = lambda main=pools.main, p=position, seen=seen: seen.append((main[p].clone(), main[-1].clone()))  # noqa: E731
                stream.push(read)
                with gpu.lock:
                    gpu.held = False
                    while not seen:
                        assert gpu.step()
                    gpu.held = True
                offset = layout.offsets[position] + layout.layers[position].index_bytes
                end = layout.offsets[position] + layout.layers[position].slice_bytes
                got, last = seen[0]
                assert torch.equal(got[1:].flatten(1), arena.data[:11, offset:end])
                late += position == 0 and bool((last == 0xEE).any())
            gpu.release()
            transfer.wait(20)
    assert late  # the first layer was seen before the last one had come


def read_page(gpu, pools, block, seen):
    """An old user's kernel in two halves, on the current stream."""
    gpu.main.push(lambda: seen.append(pools.main[0][block].clone()))
    for _ in range(3):
        gpu.main.push(lambda: None)
    gpu.main.push(lambda: seen.append(pools.main[0][block].clone()))


@pytest.mark.parametrize("method", METHODS)
def test_old_users_finish_before_their_blocks_are_overwritten(method, small, filled, pools_of):
    torn = {"ordered": 0, "control": 0}
    for (name, after), seed in itertools.product({"ordered": None, "control": ()}.items(), range(12)):
        gpu = SimGpu(seed, held=True)
        arena, pools = filled(small, 4, seed), pools_of(small, 4)
        seen = []
        with loader_of(method, arena, pools, gpu) as loader:
            read_page(gpu, pools, 2, seen)
            transfer = loader.start([1], [2], after=after)
            gpu.release()
            transfer.wait(20)
            gpu.run_all()
        torn[name] += any(bool((half != 0xEE).any()) for half in seen)
    assert torn["ordered"] == 0
    assert torn["control"] > 0  # the same without the ordering does go wrong


@pytest.mark.parametrize("method", METHODS)
def test_blocks_are_written_before_they_are_read(method, small, filled, pools_of):
    stale = {"ordered": 0, "control": 0}
    for name, seed in itertools.product(stale, range(12)):
        gpu = SimGpu(seed, held=True)
        arena, pools = filled(small, 4, seed), pools_of(small, 4)
        seen = []
        with loader_of(method, arena, pools, gpu) as loader:
            transfer = loader.start([1], [2])
            if name == "ordered":
                transfer.wait_layer(small.numbers[-1])
            gpu.main.push(lambda pools=pools, seen=seen: seen.append(pools.gather([2])[0]))
            gpu.release()
            transfer.wait(20)
            gpu.run_all()
        stale[name] += not torch.equal(seen[0], arena.data[1])
    assert stale["ordered"] == 0
    assert stale["control"] > 0


def test_fences_may_be_events_and_streams(small, filled, pools_of):
    gpu = SimGpu(0, held=True)
    arena, pools = filled(small, 8), pools_of(small, 8)
    other, event = gpu.stream(), gpu.event()
    order = []
    other.push(lambda: order.append(bool((pools.main[0] != 0xEE).any())))
    event.record(other)
    with loader_of("copy", arena, pools, gpu) as loader:
        loader.start([0], [1], after=event)
        transfer = loader.start([1], [2], after=[other, event])
        with pytest.raises(ValueError, match="after: got int"):
            loader.start([2], [3], after=[3])
        gpu.release()
        transfer.wait(20)
    assert order == [False]


@pytest.mark.parametrize("method", ["stage", "mixed", "gather"])
def test_descriptors_are_not_reused_while_a_kernel_may_read_them(method, small, filled, expected, pools_of, bytes_of):
    """Two transfers queued before the device runs anything; a shared buffer would load the first one's blocks twice."""
    gpu = SimGpu(5, held=True)
    arena, pools = filled(small, 16), pools_of(small, 16)
    with loader_of(method, arena, pools, gpu, most_in_flight=2) as loader:
        transfers = [loader.start(range(5), range(1, 6)), loader.start(range(8, 13), range(6, 11))]
        with pytest.raises(Busy, match="2 transfers in flight"):
            loader.start([15], [15])
        gpu.release()
        for transfer in transfers:
            transfer.wait(20)
        loader.start([15], [15]).wait(20)
    wanted = expected(arena, 16, [*range(5), *range(8, 13), 15], [*range(1, 11), 15])
    assert torch.equal(bytes_of(pools), wanted)


def pages_when_it_ends(transfer, pools, blocks):
    seen, ended = [], transfer._on_end

    def look(transfer):
        seen.append(pools.gather(blocks))
        ended(transfer)

    transfer._on_end = look
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_cannot_be_queued_is_reported(method, small, filled, expected, pools_of, bytes_of):
    """A call of the driver raises, earlier pieces of the layer being under way. Transfers around it are as always."""
    several = 0
    options = {"regular_from": 0, "pieces_a_call": 16, "streams": 3, "staging_bytes": 1 << 16, "first_blocks": 64}
    for fail_at, seed in itertools.product(range(8), range(6)):
        gpu = SimGpu(seed, held=True, batch=method != "copy")
        arena, pools = filled(small, 40), pools_of(small, 40)
        with loader_of(method, arena, pools, gpu, **options) as loader:
            gpu.module.fail_at = fail_at
            transfer = loader.start(range(0, 24), range(1, 25))
            gpu.module.fail_at = None
            other = loader.start(range(30, 40), range(30, 40))
            failed = list(transfer.failures())
            several += len(failed) in (1, 2)
            if failed:
                assert failed == list(small.numbers[small.numbers.index(failed[0]) :])
                with pytest.raises(SwapInError, match=rf"layer {failed[0]} was not loaded: RuntimeError: \w+: out of"):
                    transfer.wait_layer(failed[0])
                assert not any(transfer.done(layer) for layer in failed)
                with pytest.raises(ValueError, match=r"blocks: got .* of a transfer in flight"):
                    loader.start([0], [3])  # pieces of the failed layer may be under way
            at_end = pages_when_it_ends(transfer, pools, range(1, 25))
            gpu.release()
            if failed:
                with pytest.raises(SwapInError):
                    transfer.wait(20)
            else:
                transfer.wait(20)
            other.wait(20)
            gpu.run_all()
            assert torch.equal(at_end[0], pools.gather(range(1, 25)))  # nothing of it is written later
            assert torch.equal(pools.gather(range(30, 40)), arena.data[30:40])
            assert all(transfer.done(layer) for layer in set(small.numbers) - set(failed))
            loader.start(range(0, 24), range(1, 25)).wait(20)
        pages = [*range(1, 25), *range(30, 40)]
        assert torch.equal(bytes_of(pools), expected(arena, 40, [*range(24), *range(30, 40)], pages))
    assert several  # some layers arrived and some did not


def test_the_ring_goes_on_where_it_was(small, filled, pools_of):
    gpu = SimGpu(0)
    arena, pools = filled(small, 40), pools_of(small, 40)
    options = {"order": "first", "staging_parts": 5, "streams": 2, "first_blocks": 3, "staging_bytes": 1 << 17}
    with loader_of("stage", arena, pools, gpu, **options) as loader:
        for _ in range(2):
            loader.start(range(0, 24, 2), range(1, 13)).wait(20)
    calls = gpu.module.named("stage")
    # Twelve blocks are rounds of 3, 5 and 4.
    assert [(call["part"], call["turn"]) for call in calls] == [(0, 0), (3, 1), (1, 0), (4, 1)]


def test_a_staging_area_that_cannot_be_told_empty_is_not_used_again(small, filled, pools_of):
    gpu = SimGpu(0, held=True)
    arena, pools = filled(small, 40), pools_of(small, 40)
    with loader_of("stage", arena, pools, gpu) as loader:
        gpu.module.failing = {"move_bulk", "record_events"}
        transfers = [loader.start(range(8), range(1, 9))]
        gpu.module.failing = set()
        transfers.append(loader.start(range(8, 16), range(9, 17)))
        gpu.release()
        for transfer, why in zip(transfers, ("move_bulk: out of memory", "the staging area is lost"), strict=True):
            with pytest.raises(SwapInError, match=why):
                transfer.wait(20)
    assert bool((pools.main[0] == 0xEE).all()) and loader.in_flight == 0


@pytest.mark.parametrize("method", METHODS)
def test_threads_may_share_a_loader(method, small, filled, expected, pools_of, bytes_of):
    gpu = SimGpu(2)
    arena, pools = filled(small, 40), pools_of(small, 41)
    errors = []
    with loader_of(method, arena, pools, gpu, most_in_flight=8) as loader:

        def work(first: int) -> None:
            try:
                for turn in range(5):
                    ids = np.arange(first, first + 10)
                    loader.start((ids + turn) % 40, ids + 1).wait(20)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 40, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    ids = np.arange(40)
    assert torch.equal(bytes_of(pools), expected(arena, 41, ((ids + 4) % 40).tolist(), (ids + 1).tolist()))


def test_a_lost_device_is_reported(small, filled, pools_of):
    gpu = SimGpu(0, held=True)
    arena, pools = filled(small, 4), pools_of(small, 4)

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with loader_of("copy", arena, pools, gpu) as loader:
        transfer = loader.start([1], [2])
        for event in transfer.events[1:]:
            event.synchronize = broken
        gpu.release()
        with pytest.raises(SwapInError, match=r"layer 3 .*illegal memory access"):
            transfer.wait(20)
        assert transfer.done(1) and not transfer.done(3) and not transfer.done(5)


def test_the_way_back(small, filled, pools_of):
    arena, pools = filled(small, 4), pools_of(small, 12)
    for tensor in (*pools.main, *pools.index):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    for seed in SEEDS:
        target = HostArena.allocate(small, 16)
        gpu = SimGpu(seed)
        with loader_of("copy", target, pools, gpu, any_order=True) as loader:
            loader.store([*range(2, 11), 1], [*range(3, 12), 0]).wait(20)
        assert torch.equal(target.data[3:12], pools.gather(range(2, 11)))
        assert torch.equal(target.data[0], pools.gather([1])[0])
        assert [target.state(slot) for slot in (0, 1, 3, 11)] == [2, 0, 2, 2]
        assert not any(call["any_order"] for call in gpu.module.named("copy_batch"))  # kernels wrote the pages just now
    with loader_of("gather", arena, pools, SimGpu()) as loader, pytest.raises(NotImplementedError, match="store"):
        loader.store([1], [0])


def test_wait_layer_takes_no_time_out(small, filled, pools_of):
    arena, pools = filled(small, 4), pools_of(small, 4)
    with loader_of("copy", arena, pools, SimGpu()) as loader:
        transfer = loader.start([1], [2])
        with pytest.raises(ValueError, match=r"timeout: got 1\.0"):
            transfer.wait_layer(1, timeout=1.0)
        with pytest.raises(ValueError, match="layer: got 2, allowed is one of"):
            transfer.wait_layer(2)
        transfer.wait(20)


def test_a_staging_area_that_holds_no_block_is_refused(filled, pools_of):
    from gdr_swapin import V41

    arena, pools = filled(V41, 2), pools_of(V41, 2)
    with pytest.raises(ValueError, match="staging_bytes: got 65536"):
        loader_of("stage", arena, pools, SimGpu(), order="block", staging_bytes=1 << 16)
