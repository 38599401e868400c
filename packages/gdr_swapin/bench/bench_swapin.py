"""Swap-in from host memory to host memory, beside PyTorch's indexed copies."""

from __future__ import annotations

import functools

import numpy as np
import torch

from gdr_swapin import V41, HostArena, Loader, Options, PagedPools, reference
from kernel_core.bench import Bench, Case, Problem


def _load(count: int) -> Problem:
    slots = 2 * count
    arena, pools = HostArena.allocate(V41, slots), PagedPools.allocate(V41, slots)
    g = torch.Generator().manual_seed(0)
    with arena.writing(range(slots)) as data:
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=g))
    order = np.random.default_rng(0)
    chosen, pages = order.permutation(slots)[:count], order.permutation(slots - 1)[:count] + 1
    loader = Loader(arena, pools, options=Options(threads=torch.get_num_threads()))

    def check() -> None:
        loader.start(chosen, pages).wait(60)
        if not torch.equal(pools.gather(pages), arena.data[torch.from_numpy(chosen)]):
            raise ArithmeticError("blocks differ from the arena")

    return Problem(
        lambda: loader.start(chosen, pages).wait(60),
        lambda: reference.load_blocks(arena.data, chosen.tolist(), pools, pages.tolist()),
        2 * count * V41.block_bytes,
        0,
        check=check,
        cold=True,
        note=f"method {loader.method}",
    )


BENCHES = [
    Bench(
        "gdr_swapin.load",
        [Case(f"swapin_host_b{n}", {"blocks": n, "block_bytes": V41.block_bytes}, functools.partial(_load, n))
         for n in (1, 128, 1024)],
        ("csrc/*.cpp", "src/gdr_swapin/*.py"),
    )
]  # fmt: skip
