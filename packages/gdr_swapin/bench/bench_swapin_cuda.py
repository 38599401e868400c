"""Swap-in on an NVIDIA GPU: rate of the link, what it costs others, how much of it a prefill does not hide."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import swapin_problem as shared
import torch

from gdr_swapin.plan import Copies, joined
from kernel_core.bench import Bench, Case, Offer, Problem

SOURCES = ("csrc/cuda/**/*", "src/gdr_swapin/**/*.py")
OURS = {
    "ours, copy engines into the pools": ("copy", {}),
    "ours, staged whole blocks": ("stage", {"order": "block"}),
    "ours, copy engines into the pools, two pieces a copy": ("copy", {"paired": True}),
    "ours, staged and a gather of 2 CTAs": ("mixed", {"ctas": 2}),
    "ours, staged, first layer first": ("stage", {"order": "first"}),
    "ours, staged by layer": ("stage", {"order": "layer"}),
    "ours, staged behind a gathered first layer": ("stage", {"order": "lead", "lead_from": 1}),
    "ours, gather, 8 CTAs": ("gather", {"ctas": 8}),
    "ours, gather, 4 CTAs": ("gather", {}),
    "ours, gather, 4 CTAs, one launch": ("gather", {"one_launch": True}),
    "plain gather, 8 CTAs": ("gather_plain", {"ctas": 8}),
    "plain gather, 32 CTAs": ("gather_plain", {"ctas": 32}),
}


def _own(name: str, count: int, whole: bool = True) -> Offer:
    method, options = OURS[name]
    source = None if whole else shared.slice_arena()
    return Offer(name, lambda: shared.Swap(method, count, source, **options).run)


def _copies(swap: shared.Swap) -> Copies:
    """All pieces of a request, as a caller without a loader would make them."""
    from gdr_swapin.plan import layer_copies

    parts = [layer_copies(swap.arena.source, swap.slots, swap.pools, swap.blocks, p)
             for p in range(len(swap.arena.layout.layers))]  # fmt: skip
    return joined(*parts)


def _calls(copies: Copies, per_call: int) -> Callable[[], object]:
    """cudaMemcpyAsync a piece with 0, else batched calls, behind the current stream."""
    from gdr_swapin import _cuda

    side = torch.cuda.Stream()  # the batched call refuses the default stream

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        common = {**copies.arguments(), "stream": side.cuda_stream}
        if per_call == 0:
            _cuda.copy_each(**common)
        else:
            _cuda.copy_batch(**common, per_call=per_call, any_order=False, prefer_overlap=True)
        torch.cuda.current_stream().wait_stream(side)

    return run


def _contiguous(swap: shared.Swap) -> Copies:
    """The same blocks, each landing in one piece: what copy engines could do if pools were not paged by layer."""
    size = swap.arena.layout.block_bytes
    target = torch.empty(swap.bytes, dtype=torch.uint8, device="cuda")
    swap.keep = target  # type: ignore[attr-defined]
    places = np.random.default_rng(5).permutation(len(swap.slots)).astype(np.uint64)
    return Copies(
        np.uint64(target.data_ptr()) + places * np.uint64(size),
        swap.arena.source.at(swap.slots, 0),
        np.full(len(places), size, dtype=np.uint64),
    )


def _one_copy(size: int) -> Callable[[], object]:
    host = shared.arena().data.view(-1)[:size]
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    return lambda: target.copy_(host, non_blocking=True)


def _load(count: int, whole: bool) -> Problem:
    swap = shared.Swap("auto", count, None if whole else shared.slice_arena())
    peers = [
        *(_own(name, count, whole) for name in OURS),
        Offer("cudaMemcpyAsync a piece", lambda: _calls(_copies(swap), 0), "torch"),
        Offer("cudaMemcpyBatchAsync, 256 pieces a call", lambda: _calls(_copies(swap), 256), "torch"),
        Offer("one contiguous copy", lambda: _one_copy(swap.bytes), "torch"),
    ]
    if whole:
        name = "cudaMemcpyBatchAsync, 256 a call, blocks contiguous on both sides"
        peers.append(Offer(name, lambda: _calls(_contiguous(swap), 256), "torch"))
    return Problem(swap.run, None, swap.bytes, 0, peers=peers, check=swap.check, path="h2d",
                   note=f"cuda; method {swap.loader.method}")  # fmt: skip


def _beside(make: Callable[[], tuple[Callable[[], object], int, int]], count: int) -> Problem:
    """A kernel beside a transfer that starts with it; "alone" is the same kernel with nothing beside it."""
    run, size, flops = make()

    def beside(method: str, **options: object) -> Callable[[], object]:
        swap = shared.Swap(method, count, **options)
        stream = torch.cuda.Stream()

        def both() -> None:
            # The transfer follows a stream that waits for this moment, not for the kernel queued behind it.
            stream.wait_stream(torch.cuda.current_stream())
            run()
            with torch.cuda.stream(stream):
                swap.start()

        return both

    peers = [Offer("alone", lambda: run, "torch")]
    peers += [Offer(f"beside {name}", functools.partial(beside, method, **options))
              for name, (method, options) in OURS.items()]  # fmt: skip
    return Problem(beside("auto"), None, size, flops, peers=peers, compute="bf16",
                   note=f"cuda; a transfer of {count} blocks starts with the kernel")  # fmt: skip


def _product() -> tuple[Callable[[], object], int, int]:
    shared.built()
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 3 * 2 * n * n, 2 * n**3


def _memory() -> tuple[Callable[[], object], int, int]:
    shared.built()
    x = torch.randn(3 << 28, device="cuda")
    out = torch.empty_like(x)
    return lambda: torch.add(x, 1.0, out=out), 2 * 4 * x.numel(), 0


def _exposed(count: int) -> Problem:
    prefill, swap = shared.Prefill(), shared.Swap("auto", count)
    alone = shared.Swap("auto", count)

    def first_then_compute() -> None:
        alone.run()
        prefill.run()

    swap.check()
    exposed = sorted(prefill.exposed_us(swap.start) for _ in range(5))[2]
    return Problem(
        lambda: prefill.behind(swap.start()),
        None,
        0,
        prefill.flops,
        peers=[
            Offer("without swap-in", lambda: prefill.run, "torch"),
            Offer("swap-in first", lambda: first_then_compute),
            Offer("swap-in alone", lambda: alone.run),
        ],
        compute="bf16",
        note=f"cuda; the stream waits {exposed:.0f} us in its four waits; {count} blocks",
    )


BENCHES = [
    Bench(
        "gdr_swapin.load",
        [
            Case("swapin_block", {"blocks": shared.BLOCKS, "block_bytes": 113920},
                 lambda: _load(shared.BLOCKS, True)),
            Case("swapin_piece", {"blocks": shared.BLOCKS, "piece_bytes": [4352, 18432]},
                 lambda: _load(shared.BLOCKS, False)),
            Case("swapin_product_slowdown", {"product": 8192, "blocks": 640}, lambda: _beside(_product, 640)),
            Case("swapin_memory_slowdown", {"floats": 3 << 28, "blocks": 640}, lambda: _beside(_memory, 640)),
            Case("swapin_exposed_16k", {"tokens": shared.TOKENS, "layers": shared.LAYERS, "blocks": 1024},
                 lambda: _exposed(1024)),
        ],
        SOURCES,
        device="cuda",
    )
]  # fmt: skip
