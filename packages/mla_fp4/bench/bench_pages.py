"""Norm with rotation, stores into pages, and full index scores: the small ops around attention and selection."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.bench import Bench, Case, Problem

DIM, INDEX_DIM, ROPE, ROWS_PER_BLOCK = 512, 128, 64, 128


def _beside_reference(call: Callable[[], object], moved: int, flops: int, check: Callable[[], object]) -> Problem:
    def reference() -> object:
        with using("reference"):
            return call()

    return Problem(native=call, reference=reference, bytes=moved, flops=flops, check=check)


def _norm_rope(tokens: int) -> Problem:
    g = torch.Generator().manual_seed(tokens)
    angle = torch.randn(tokens, ROPE // 2, generator=g)
    x, weight = torch.randn(tokens, DIM, generator=g), torch.rand(DIM, generator=g)
    rope = torch.cat([angle.cos(), angle.sin()], dim=1)

    def call() -> torch.Tensor:
        return mla_fp4.norm_rope(x, weight, 1e-6, rope)

    def check() -> None:
        with using("reference"):
            expected = call()
        torch.testing.assert_close(call(), expected, atol=1e-5, rtol=1e-5)

    return _beside_reference(call, tokens * (2 * DIM + ROPE) * 4, tokens * DIM * 6, check)


def _store(tokens: int, kind: str) -> Problem:
    g = torch.Generator().manual_seed(tokens)
    blocks = -(-tokens // ROWS_PER_BLOCK) + 1
    slots = torch.randperm((blocks - 1) * ROWS_PER_BLOCK, generator=g)[:tokens] + ROWS_PER_BLOCK
    if kind == "main":
        rows = formats.quantize_main(torch.randn(tokens, DIM, generator=g))
        pages = torch.zeros(blocks, ROWS_PER_BLOCK, rows.shape[1], dtype=torch.uint8)
        call = functools.partial(mla_fp4.store_main, rows, pages, slots)
    else:
        rows = formats.quantize_index(torch.randn(tokens, INDEX_DIM, generator=g))
        pages = torch.zeros(blocks, ROWS_PER_BLOCK * rows.shape[1], dtype=torch.uint8)
        call = functools.partial(mla_fp4.store_index, rows, pages, slots, ROWS_PER_BLOCK)

    def check() -> None:
        call()
        written = pages.clone()
        pages.zero_()
        with using("reference"):
            call()
        assert written.equal(pages)

    return _beside_reference(call, 2 * rows.nbytes, 0, check)


def _scores(keys: int, heads: int) -> Problem:
    g = torch.Generator().manual_seed(keys)
    blocks = keys // ROWS_PER_BLOCK
    pages = torch.zeros(blocks + 1, ROWS_PER_BLOCK * 68, dtype=torch.uint8)
    packed = formats.quantize_index(torch.randn(keys, INDEX_DIM, generator=g))
    mla_fp4.store_index(packed, pages, ROWS_PER_BLOCK + torch.arange(keys), ROWS_PER_BLOCK)
    call = functools.partial(
        mla_fp4.index_scores,
        torch.randn(1, heads, INDEX_DIM, generator=g),
        torch.randn(1, heads, generator=g) / heads,
        pages,
        ROWS_PER_BLOCK,
        torch.arange(1, blocks + 1, dtype=torch.int32).view(1, -1),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([keys], dtype=torch.int32),
    )

    def check() -> None:
        with using("reference"):
            expected = call()
        torch.testing.assert_close(call(), expected, atol=1e-4, rtol=1e-4)

    return _beside_reference(call, keys * (68 + 4), keys * heads * (2 * INDEX_DIM + 3), check)


def _cases(name: str, make: Callable[..., Problem], *args: object) -> list[Case]:
    return [Case(f"{name}_t{t}", {"tokens": t}, functools.partial(make, t, *args)) for t in (1, 512)]


BENCHES = [
    Bench("mla_fp4.norm_rope", _cases("norm_rope_d512", _norm_rope)),
    Bench("mla_fp4.store_main", _cases("store_main", _store, "main")),
    Bench("mla_fp4.store_index", _cases("store_index", _store, "index")),
    Bench(
        "mla_fp4.index_scores",
        [Case("index_scores_h8_k4096", {"keys": 4096, "heads": 8}, functools.partial(_scores, 4096, 8))],
    ),
]
