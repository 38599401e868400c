"""Index scoring with selection: decode and prefill of the small model (8 heads) and the released one (32 heads)."""

from __future__ import annotations

import functools

import torch

import mla_fp4
from kernel_core import using
from kernel_core.bench import Bench, Case, Problem

DIM, ROWS_PER_BLOCK = 128, 128
NOTE = "packed keys, bf16 tile unit where the CPU has it; bytes are the keys of a request once and the chosen positions"


def _arguments(requests: int, rows: int, heads: int, keys: int) -> dict[str, object]:
    g = torch.Generator().manual_seed(keys + rows)
    blocks = keys // ROWS_PER_BLOCK
    pages = torch.zeros(requests * blocks + 1, ROWS_PER_BLOCK * 68, dtype=torch.uint8)
    for block in range(1, len(pages)):  # block by block: the keys need not stand in memory at once
        packed = mla_fp4.kv_rows(torch.randn(ROWS_PER_BLOCK, DIM, generator=g), None, 1e-6, None, format="index")
        mla_fp4.store_index(packed, pages, block * ROWS_PER_BLOCK + torch.arange(ROWS_PER_BLOCK), ROWS_PER_BLOCK)
    total = requests * rows
    return {
        "q": torch.randn(total, heads, DIM, generator=g),
        "head_weights": torch.randn(total, heads, generator=g) / heads,
        "pages": pages,
        "rows_per_block": ROWS_PER_BLOCK,
        "block_table": (torch.randperm(requests * blocks, generator=g) + 1).int().view(requests, blocks),
        "cu_seqlens": torch.arange(0, total + 1, rows).int(),
        "visible": (keys - rows + 1 + torch.arange(rows)).repeat(requests).int(),
    }


def _problem(requests: int, rows: int, heads: int, keys: int, k: int, candidates: int = 0) -> Problem:
    arguments = _arguments(requests, rows, heads, keys)
    total = requests * rows
    scored = requests * (rows * (keys - rows + 1) + rows * (rows - 1) // 2)
    arguments["k"] = k
    read = requests * keys
    if candidates:
        g = torch.Generator().manual_seed(0)
        blocks = torch.rand(total, (keys - rows) // 8, generator=g).topk(candidates).indices.sort().values
        arguments["candidates"] = blocks.int()
        scored, read = total * candidates * 8, total * candidates * 8

    def reference() -> tuple[torch.Tensor, torch.Tensor | None]:
        with using("reference"):
            return mla_fp4.index_topk(**arguments)

    def check() -> None:
        differing = (mla_fp4.index_topk(**arguments)[0] != reference()[0]).float().mean().item()
        assert differing < 0.02, f"{differing:.1%} of the positions differ from the reference"

    return Problem(
        native=functools.partial(mla_fp4.index_topk, **arguments),
        reference=reference,
        bytes=read * 68 + total * (heads * (DIM + 1) * 4 + k * 4),
        flops=scored * heads * (2 * DIM + 3),
        check=check,
        compute="bf16",
        note=NOTE,
    )


def _case(point: str, requests: int, rows: int, heads: int, keys: int, k: int, candidates: int = 0) -> Case:
    shape = {"requests": requests, "rows": rows, "heads": heads, "keys": keys, "k": k}
    if candidates:
        shape["candidates"] = candidates
    return Case(point, shape, functools.partial(_problem, requests, rows, heads, keys, k, candidates))


BENCHES = [
    Bench(
        "mla_fp4.index_topk",
        [
            _case("index_decode_h8_b1_k4096", 1, 1, 8, 4096, 64),
            _case("index_decode_h8_b16_k4096", 16, 1, 8, 4096, 64),
            _case("index_prefill_h8_q512_k4096", 1, 512, 8, 4096, 64),
            _case("index_decode_h32_b1_k65536", 1, 1, 32, 65536, 512),
            _case("index_prefill_h32_q128_k16384", 1, 128, 32, 16384, 512),
            _case("index_candidates_h32_b1_k65536", 1, 1, 32, 65536, 512, candidates=2048),
        ],
    )
]
