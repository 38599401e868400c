"""The ring kernel's own code on the host, with copies as early and as late as they may come."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gdr_swapin import V41
from kernel_core.testing import at_page_end
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    library = host_library(
        HERE / "host/ring.cpp", tmp_path_factory.mktemp("ring"), HERE.parent / "csrc", HERE / "host/stub"
    )
    library.move_ring_host.restype = ctypes.c_char_p
    library.piece_count_host.restype = ctypes.c_int64
    return library


def table(pools, offsets, chosen):
    layers = pools.layout.layers
    rows = [
        (offsets[i], layers[i].index_bytes, layers[i].main_bytes, pools.index[i].data_ptr(), pools.main[i].data_ptr())
        for i in chosen
    ]
    return np.array(rows, dtype=np.uint64)


def move(
    lib,
    source,
    stride,
    slots,
    blocks,
    pools,
    *,
    chosen,
    offsets=None,
    late=True,
    piece=1024,
    ctas=2,
    stages=4,
    groups=0,
    done=None,
    told=None,
    once=False,
):
    rows = table(pools, offsets or pools.layout.offsets, chosen)
    under_way = ctypes.c_int()
    error = lib.move_ring_host(
        int(late),
        address(source),
        ctypes.c_int64(stride),
        None if slots is None else address(slots),
        address(blocks),
        ctypes.c_int64(len(blocks)),
        ctypes.c_uint32(piece),
        ctypes.c_void_p(rows.ctypes.data),
        len(rows),
        ctypes.c_uint32(groups),
        None if done is None else address(done),
        told,
        int(once),
        ctas,
        stages,
        ctypes.byref(under_way),
    )
    assert error is None, error.decode()
    return under_way.value


def ids(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("piece", "ctas", "stages"), [(16, 3, 4), (272, 1, 5), (1024, 8, 16), (4096, 2, 4), (22784, 8, 9)]
)
def test_every_piece_lands(lib, layout, filled, expected, pools_of, bytes_of, late, piece, ctas, stages):
    if piece == 16 and layout.block_bytes > 10_000:
        pytest.skip("thousands of pieces")
    arena, pools = filled(layout, 9), pools_of(layout, 12)
    slots, blocks = [8, 0, 3, 3, 7, 1], [5, 11, 1, 2, 9, 3]
    options = {"late": late, "piece": piece, "ctas": ctas, "stages": stages}
    everything = range(len(layout.layers))
    move(lib, arena.data, layout.block_bytes, ids(slots), ids(blocks), pools, chosen=everything, **options)
    assert torch.equal(bytes_of(pools), expected(arena, 12, slots, blocks))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 31])
def test_counts_around_the_ring(lib, small, filled, expected, pools_of, bytes_of, count):
    """Fewer items than CTAs, than stages, and all remainders of the ring."""
    arena, pools = filled(small, 32), pools_of(small, 33)
    blocks = list(range(1, count + 1))
    for stages in (4, 5, 7):
        move(
            lib, arena.data, small.block_bytes, ids(blocks), ids(blocks), pools, chosen=range(3), stages=stages, ctas=4
        )
    assert torch.equal(bytes_of(pools), expected(arena, 33, blocks, blocks))


def test_one_layer_from_a_staging_area(lib, layout, filled, pools_of):
    """Slices back to back, block i of the launch being slice i; nothing of the other layers is touched."""
    arena, pools = filled(layout, 5), pools_of(layout, 8)
    for position, source in enumerate(layout.layers):
        start = layout.offsets[position]
        area = arena.data[:, start : start + source.slice_bytes].contiguous()
        zeros = [0] * len(layout.layers)
        move(
            lib,
            area,
            source.slice_bytes,
            None,
            ids([7, 1, 2, 6, 3]),
            pools,
            chosen=[position],
            offsets=zeros,
            piece=4096,
        )
        later = range(position + 1, len(layout.layers))
        assert all((pools.main[i] == 0xEE).all() and (pools.index[i] == 0xEE).all() for i in later)
    assert torch.equal(pools.gather([7, 1, 2, 6, 3]), arena.data)


def test_loads_run_ahead(lib, small, filled, pools_of):
    arena, pools = filled(small, 40), pools_of(small, 41)
    blocks = list(range(1, 41))
    ahead = move(
        lib, arena.data, small.block_bytes, ids(blocks[:-1]), ids(blocks[:-1]), pools, chosen=[0], ctas=1, stages=16
    )
    assert ahead == 16


def test_nothing_is_read_behind_the_arena(lib, small, filled, pools_of):
    arena, pools = filled(small, 3), pools_of(small, 4)
    edge = at_page_end(arena.data)
    move(lib, edge, small.block_bytes, ids([2, 0, 1]), ids([1, 2, 3]), pools, chosen=range(3), piece=4096)
    assert torch.equal(pools.gather([1, 2, 3]), arena.data[[2, 0, 1]])


TOLD = ctypes.CFUNCTYPE(None)
GROUPS = {"layer": 0b1111, "first": 0b1001, "block": 0b1000}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", GROUPS)
@pytest.mark.parametrize(("piece", "ctas", "stages"), [(4096, 1, 4), (11392, 3, 7), (45568, 8, 4)])
def test_a_counter_moves_only_when_its_layers_are_written(
    lib, filled, expected, pools_of, bytes_of, late, order, piece, ctas, stages
):
    """CTAs run one after the other here: what the last of them tells of a group must be in the pools by then."""
    arena, pools = filled(V41, 12), pools_of(V41, 12)
    slots, blocks = [8, 0, 3, 3, 7, 1, 11], [5, 11, 1, 2, 9, 3, 4]
    wanted = arena.data[slots]
    ends = [l + 1 for l in range(4) if GROUPS[order] >> l & 1]
    done, seen = torch.zeros(len(ends), dtype=torch.int32), []

    def told():
        for group, end in enumerate(ends):
            if int(done[group]) == ctas:
                upto = V41.block_bytes if end == 4 else V41.offsets[end]
                seen.append((group, torch.equal(pools.gather(blocks)[:, :upto], wanted[:, :upto])))

    move(lib, arena.data, V41.block_bytes, ids(slots), ids(blocks), pools, chosen=range(4), late=late, piece=piece,
         ctas=ctas, stages=stages, groups=GROUPS[order], done=done, told=TOLD(told), once=True)  # fmt: skip
    assert done.tolist() == [ctas] * len(ends)
    assert {group for group, _ in seen} == set(range(len(ends))) and all(right for _, right in seen)
    assert torch.equal(bytes_of(pools), expected(arena, 12, slots, blocks))


def test_first_layers_are_told_of_before_the_last_is_there(lib, filled, pools_of):
    arena, pools = filled(V41, 12), pools_of(V41, 12)
    done, early = torch.zeros(4, dtype=torch.int32), []

    def told():
        early.append((done.tolist(), bool((pools.main[3][1:12] == 0xEE).all())))

    move(lib, arena.data, V41.block_bytes, ids(range(11)), ids(range(1, 12)), pools, chosen=range(4), piece=22784,
         ctas=1, groups=0b1111, done=done, told=TOLD(told))  # fmt: skip
    assert [counts for counts, _ in early] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert [nothing for _, nothing in early][:2] == [True, True]


def test_pieces(lib):
    def pieces(*args):
        return lib.piece_count_host(ctypes.c_int64(args[0]), *map(ctypes.c_uint32, args[1:]))

    assert pieces(7, 11392, 4352, 18432) == 14
    assert pieces(7, 22784, 8704, 36864) == 14
    assert pieces(3, 16384, 4352, 18432) == 6
    assert pieces(2**40, 16, 16, 0) == 2**40


def test_addresses_beyond_4_gib(lib, small, pools_of):
    """Offsets are 64-bit: a block 5 GiB into a sparse arena."""
    slot = 5 * 2**30 // small.block_bytes
    size = (slot + 1) * small.block_bytes
    with tempfile.TemporaryFile() as file:
        pages = np.memmap(file, dtype=np.uint8, mode="w+", shape=(size,))
    source = torch.from_numpy(pages)
    source[-small.block_bytes :] = torch.arange(small.block_bytes) % 251
    pools = pools_of(small, 3)
    move(lib, source, small.block_bytes, ids([slot]), ids([2]), pools, chosen=range(3))
    assert torch.equal(pools.gather([2])[0], source[-small.block_bytes :])
