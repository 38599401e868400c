"""What the swap-in benches share: a filled arena, pools, loaders that repeat a request, a stand-in for a prefill."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from gdr_swapin import V41, BlockLayout, HostArena, Loader, Options, PagedPools, SourceLayer, Transfer
from kernel_core.bench.device import cuda_module

BLOCKS = 2356  # 256 MiB
SLOTS = 2 * 4096  # of the arena, 933 MB; only every second one is used, so that no two blocks are neighbours
TOKENS, WIDTH = 16384, 5120  # of the prefill
LATENT, HEADS = 1536, 32768  # its query products
LAYERS = 21  # until the last source layer


def built() -> None:
    """Raise NotImplementedError where the package has no CUDA module."""
    if cuda_module("gdr_swapin._cuda", "move_bulk") is None:
        raise NotImplementedError("gdr_swapin._cuda is not built, and there is no other implementation")


@functools.cache
def arena() -> HostArena:
    """Pinned, random bytes, all slots ready."""
    built()
    made = HostArena.allocate(V41, SLOTS, pinned=True)
    g = torch.Generator("cuda").manual_seed(0)
    with made.writing(range(SLOTS)) as data:
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, device="cuda", generator=g))
    return made


@functools.cache
def slice_arena() -> HostArena:
    """The same memory, of which each block's slice of layer 2 counts: pieces of 4,352 and 18,432 bytes, far apart."""
    whole = arena()
    offset = whole.data.data_ptr() - whole.region.data_ptr()
    layout = BlockLayout((SourceLayer(2, 64),))
    return HostArena.foreign(layout, whole.region.numpy(), SLOTS, offset=offset, stride=V41.block_bytes)


@functools.cache
def pools(layout: BlockLayout = V41) -> PagedPools:
    return PagedPools.allocate(layout, SLOTS + 1, "cuda")


def scattered(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Slots, no two of them neighbours, and pages, both in random order."""
    g = np.random.default_rng(seed)
    return 2 * g.permutation(SLOTS // 2)[:count], g.permutation(SLOTS)[:count] + 1


def other_pages(blocks: np.ndarray, seed: int = 1) -> np.ndarray:
    """As many pages that are none of these."""
    rest = np.setdiff1d(np.arange(1, SLOTS + 1), blocks)
    return np.random.default_rng(seed).permutation(rest)[: len(blocks)]


@functools.lru_cache(2)
def _blocks_on_device(count: int, whole: bool) -> torch.Tensor:
    data = (arena() if whole else slice_arena()).data
    return data[torch.from_numpy(scattered(count)[0])].to("cuda")


class Swap:
    """A loader and one request of it, which it can repeat, into two sets of pages in turn.

    So that a start does not wait until the one before has been told that it ended.
    """

    def __init__(self, method: str, count: int, source: HostArena | None = None, **options: object) -> None:
        self.arena = source or arena()
        self.pools = pools(self.arena.layout)
        self.loader = Loader(self.arena, self.pools, method, options=Options(**options))  # type: ignore[arg-type]
        self.slots, self.blocks = scattered(count)
        self.bytes = count * self.arena.layout.block_bytes
        self._pages = (self.blocks, other_pages(self.blocks))
        self._pending: list[Transfer | None] = [None, None]
        self._turn = 0

    def start(self) -> Transfer:
        """Behind the current stream. The one before the last has to have ended; its pages are these."""
        turn, self._turn = self._turn, 1 - self._turn
        pending = self._pending[turn]
        if pending is not None:
            pending.wait(10)
        self._pending[turn] = transfer = self.loader.start(self.slots, self._pages[turn])
        return transfer

    def run(self) -> None:
        """And the current stream waits for the last layer."""
        self.start().wait_layer(self.arena.layout.numbers[-1])

    def check(self) -> None:
        """Poison the pages, load, compare every byte, for both sets of pages; raises ArithmeticError."""
        for _ in self._pages:
            self._check(self._pages[self._turn])

    def _check(self, blocks: np.ndarray) -> None:
        for tensor in (*self.pools.main, *self.pools.index):
            tensor.fill_(0xEE)
        self.run()
        torch.cuda.synchronize()
        untouched = np.setdiff1d(np.arange(self.pools.num_blocks), blocks)
        wanted = _blocks_on_device(len(self.slots), self.arena is arena())
        for part in np.array_split(np.arange(len(self.slots)), 8):
            if not torch.equal(self.pools.gather(blocks[part]), wanted[torch.from_numpy(part).cuda()]):
                raise ArithmeticError(f"{self.loader.method}: blocks differ from the arena")
        if not bool((self.pools.gather(untouched[:64]) == 0xEE).all()):
            raise ArithmeticError(f"{self.loader.method}: a page was written that nobody asked for")


class Prefill:
    """The query products of 21 layers for 16,384 tokens: less work than the layers have, so waits show sooner."""

    def __init__(self) -> None:
        g = torch.Generator("cuda").manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)

        self.x, self.down, self.up = normal(TOKENS, WIDTH), normal(WIDTH, LATENT), normal(LATENT, HEADS)
        self.latent = torch.empty(TOKENS, LATENT, device="cuda", dtype=torch.bfloat16)
        self.heads = torch.empty(TOKENS, HEADS, device="cuda", dtype=torch.bfloat16)
        self.flops = LAYERS * 2 * TOKENS * LATENT * (WIDTH + HEADS)

    def run(self, before_layer: Callable[[int], None] = lambda layer: None) -> None:
        for layer in range(LAYERS):
            before_layer(layer)
            torch.mm(self.x, self.down, out=self.latent)
            torch.mm(self.latent, self.up, out=self.heads)

    def behind(self, transfer: Transfer) -> None:
        """Each source layer waits for its blocks."""
        self.run(lambda layer: transfer.wait_layer(layer) if layer in transfer.layers else None)

    def exposed_us(self, start: Callable[[], Transfer]) -> float:
        """Time that the stream spent in the four waits."""
        pairs = []

        def wait(layer: int) -> None:
            if layer in transfer.layers:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                transfer.wait_layer(layer)
                after.record()
                pairs.append((before, after))

        transfer = start()
        self.run(wait)
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in pairs) * 1e3
