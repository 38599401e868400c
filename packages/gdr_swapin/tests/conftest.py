"""Small layouts, filled arenas, and the expected contents of pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gdr_swapin import V41, BlockLayout, HostArena, PagedPools, SourceLayer, reference

SMALL = BlockLayout((SourceLayer(1, 4), SourceLayer(3, 4), SourceLayer(5, 8)))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["small", "v41"])
def layout(request) -> BlockLayout:
    return SMALL if request.param == "small" else V41


@pytest.fixture
def small() -> BlockLayout:
    return SMALL


@pytest.fixture
def filled() -> Callable[..., HostArena]:
    """An arena whose slots are all ready and hold random bytes: no two blocks, rows or fields agree."""

    def make(layout: BlockLayout, slots: int, seed: int = 0) -> HostArena:
        arena = HostArena.allocate(layout, slots)
        g = torch.Generator().manual_seed(seed)
        with arena.writing(range(slots)) as data:
            data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=g))
        return arena

    return make


@pytest.fixture
def expected() -> Callable[..., torch.Tensor]:
    """All pages of pools, at first 0xEE, after the reference has loaded the blocks."""

    def make(arena: HostArena, num_blocks: int, slots, blocks) -> torch.Tensor:
        pools = poisoned_pools(arena.layout, num_blocks)
        reference.load_blocks(arena.data, list(slots), pools, list(blocks))
        return contents(pools)

    return make


def poisoned_pools(layout: BlockLayout, num_blocks: int) -> PagedPools:
    """Pools full of 0xEE: what is written beside a page shows."""
    pools = PagedPools.allocate(layout, num_blocks)
    for tensor in (*pools.main, *pools.index):
        tensor.fill_(0xEE)
    return pools


def contents(pools: PagedPools) -> torch.Tensor:
    return pools.gather(range(pools.num_blocks)).cpu()


@pytest.fixture
def pools_of() -> Callable[..., PagedPools]:
    return poisoned_pools


@pytest.fixture
def bytes_of() -> Callable[..., torch.Tensor]:
    return contents
