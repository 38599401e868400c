"""Bytes at rest, slots and their states, shared memory between processes."""

from __future__ import annotations

import mmap
import subprocess
import sys
from multiprocessing import shared_memory

import pytest
import torch

from gdr_swapin import V41, BlockLayout, HostArena, Loader, SourceLayer, reference, region_bytes


def test_the_real_layout():
    assert V41.block_bytes == 113_920 and V41.numbers == (2, 8, 14, 20)
    starts = [(offset, offset + s.index_bytes) for offset, s in zip(V41.offsets, V41.layers, strict=True)]
    assert starts == [(0, 4352), (22784, 27136), (45568, 49920), (68352, 77056)]
    assert V41.tag != BlockLayout(V41.layers[:3]).tag


def test_each_byte_has_one_place(layout, pools_of):
    """Round trip with a number for every 16 bytes of a block."""
    pools = pools_of(layout, 3)
    marks = torch.arange(layout.block_bytes // 16).repeat_interleave(16)
    data = torch.stack([(marks >> 8).to(torch.uint8), (marks & 0xFF).to(torch.uint8)])
    reference.load_blocks(data, [0, 1], pools, [2, 1])
    assert torch.equal(pools.gather([2, 1]), data)
    parts = reference.split_block(layout, data[1])
    for i, layer in enumerate(layout.numbers):
        index, main = parts[layer]
        assert torch.equal(index, pools.index[i][1]) and torch.equal(main, pools.main[i][1])


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((), "layers: got 0 layers"),
        ((SourceLayer(3, 4), SourceLayer(3, 4)), r"layers: got \[3, 3\]"),
        ((SourceLayer(-1, 4),), r"layers: got \[-1\]"),
        ((SourceLayer(1, 0),), "layer 1: got parts of"),
        ((SourceLayer(1, 3),), "layer 1: got parts of .* multiples of 16"),
    ],
)
def test_bad_layouts(layers, words):
    with pytest.raises(ValueError, match=words):
        BlockLayout(layers)


def test_states(small):
    arena = HostArena.allocate(small, 4)
    assert [arena.state(i) for i in range(4)] == [0] * 4
    with arena.writing([1, 2]) as data:
        assert arena.state(1) == 1
        data[1:3] = 7
        with pytest.raises(ValueError, match=r"slots \[2\] that are being written"):
            arena.begin_write([2, 3])
        assert arena.state(3) == 0
    assert [arena.state(i) for i in range(4)] == [0, 2, 2, 0]
    with pytest.raises(ZeroDivisionError), arena.writing([1]):
        raise ZeroDivisionError
    assert arena.state(1) == 0
    with pytest.raises(ValueError, match="that nobody writes"):
        arena.end_write([2])
    for wrong in ([4], [-1]):
        with pytest.raises(ValueError, match="slots: got"):
            arena.begin_write(wrong)
    with pytest.raises(ValueError, match="slot: got 4"):
        arena.state(4)


def test_leased_slots_are_not_written(small, filled):
    arena = filled(small, 4)
    ids = arena.checked([1, 1, 2])
    arena.lease(ids)
    with pytest.raises(ValueError, match=r"leased slots \[2\]"):
        arena.begin_write([0, 2])
    assert arena.state(0) == 2
    with pytest.raises(ValueError, match="3 leases held"):
        arena.unregister()
    arena.release(ids)
    arena.begin_write([1])
    with pytest.raises(ValueError, match=r"slots \[1\] that are not written"):
        arena.lease(arena.checked([0, 1]))
    arena.unregister()  # the refused lease held nothing


WRITER = """
import sys
from multiprocessing import resource_tracker, shared_memory
from gdr_swapin import HostArena, BlockLayout, SourceLayer
layout = BlockLayout((SourceLayer(1, 4), SourceLayer(3, 4), SourceLayer(5, 8)))
memory = shared_memory.SharedMemory(sys.argv[1])
resource_tracker.unregister(memory._name, "shared_memory")
arena = HostArena.over(layout, memory.buf, 6, create=False)
with arena.writing([2, 5]) as data:
    data[2] = 22
    data[5] = 55
arena.begin_write([1])
data[1, :100] = 11
sys.stdout.flush()
import os
os._exit(9)
"""


def test_another_process_fills_shared_memory_and_dies(small, pools_of):
    """What it published is there; the slot that it was writing stays unreadable."""
    memory = shared_memory.SharedMemory(create=True, size=region_bytes(small, 6))
    try:
        arena = HostArena.over(small, memory.buf, 6, create=True)
        done = subprocess.run([sys.executable, "-c", WRITER, memory.name], capture_output=True, text=True, check=False)
        assert done.returncode == 9, done.stderr
        pools = pools_of(small, 4)
        with Loader(arena, pools) as loader:
            loader.start([5, 2], [1, 3]).wait(10)
            with pytest.raises(ValueError, match=r"slots \[1\] that are not written"):
                loader.start([2, 1], [1, 2])
        assert (pools.gather([1]) == 55).all() and (pools.gather([3]) == 22).all()
        with pytest.raises(ValueError, match="layout"):
            HostArena.over(V41, _larger(memory, V41, 6), 6, create=False)
        with pytest.raises(ValueError, match="slots: got 5"):
            HostArena.over(small, memory.buf, 5, create=False)
        memory.buf[0] = 0
        with pytest.raises(ValueError, match="buffer: got header"):
            HostArena.over(small, memory.buf, 6, create=False)
        del arena, loader
    finally:
        memory.unlink()


def _larger(memory, layout, slots):
    copy = mmap.mmap(-1, region_bytes(layout, slots))
    copy[: memory.size] = bytes(memory.buf)
    return copy


def test_buffers_that_do_not_fit(small):
    size = region_bytes(small, 2)
    with pytest.raises(ValueError, match=r"buffer: got .* bytes"):
        HostArena.over(small, mmap.mmap(-1, size - 1), 2, create=True)
    with pytest.raises(ValueError, match="read-only"):
        HostArena.over(small, mmap.mmap(-1, size, prot=mmap.PROT_READ), 2, create=True)
    with pytest.raises(ValueError, match="inside a page"):
        HostArena.over(small, memoryview(mmap.mmap(-1, size + 64))[64:], 2, create=True)
    for slots in (0, -3):
        with pytest.raises(ValueError, match="slots: got"):
            HostArena.allocate(small, slots)


def test_a_region_of_somebody_else(small, pools_of):
    """Blocks behind a header of their own, a whole number of pages apart."""
    stride, offset = 8192, 4096 + 128
    assert stride > small.block_bytes
    memory = mmap.mmap(-1, offset + 5 * stride)
    arena = HostArena.foreign(small, memory, 5, offset=offset, stride=stride)
    g = torch.Generator().manual_seed(1)
    arena.data.copy_(torch.randint(0, 256, arena.data.shape, dtype=torch.uint8, generator=g))
    start = offset + 3 * stride
    assert bytes(arena.data[3].numpy()) == memory[start : start + small.block_bytes]
    pools = pools_of(small, 6)
    with Loader(arena, pools) as loader:
        loader.start([4, 0, 3], [1, 5, 2]).wait(10)
    assert torch.equal(pools.gather([1, 5, 2]), arena.data[[4, 0, 3]])
    for wrong in (
        {"offset": 8, "stride": stride},
        {"offset": 0, "stride": small.block_bytes - 16},
        {"offset": -16, "stride": stride},
    ):
        with pytest.raises(ValueError, match=r"(offset|stride): got"):
            HostArena.foreign(small, memory, 2, **wrong)
