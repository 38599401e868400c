"""Sparse attention and index scores on an NVIDIA GPU, at the production shapes: 128 + 512 packed keys a row.

Every sample finds cold caches and random rows. The note of a row says which implementation ran.
"""

from __future__ import annotations

import functools

import torch

from kernel_core import formats
from kernel_core.bench import Bench, Case, Problem

DIM, ROPE, WINDOW, RING, SELECTED, ROWS_PER_BLOCK = 512, 64, 128, 134, 512, 128
START = VISIBLE = 8192
INDEX_DIM, INDEX_HEADS = 128, 32
_SOURCES = ("csrc/cuda/**/*", "src/mla_fp4/triton_*.py")


def attention_arguments(requests: int, rows: int, heads: int, device: str, visible: int = VISIBLE) -> dict:
    """Tensors of a step: every window full, every list of `SELECTED` rows drawn from `visible`, q in bfloat16."""
    g = torch.Generator(device).manual_seed(requests * rows + heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device)

    total, blocks = requests * rows, visible // ROWS_PER_BLOCK
    pages = torch.empty(requests * blocks + 1, ROWS_PER_BLOCK, DIM // 2 + DIM // 16, dtype=torch.uint8, device=device)
    for first in range(0, len(pages), 1024):  # float32 values of all pages at once would not fit everywhere
        part = pages[first : first + 1024]
        part.copy_(formats.quantize_main(normal(*part.shape[:2], DIM)))
    drawn = [
        torch.rand(1024, visible, generator=g, device=device).topk(SELECTED).indices for _ in range(-(-total // 1024))
    ]
    return {
        "q": normal(total, heads, DIM).bfloat16(),
        "new_rows": formats.quantize_window(normal(total, DIM)),
        "ring": formats.quantize_window(normal(requests + 1, RING, DIM)),
        "ring_slot": torch.arange(1, requests + 1, device=device).int(),
        "cu_seqlens": torch.arange(0, total + 1, rows, device=device).int(),
        "start_pos": torch.full((requests,), START, device=device),
        "lower": torch.zeros(requests, dtype=torch.int64, device=device),
        "window": WINDOW,
        "pages": pages,
        "rows_per_block": ROWS_PER_BLOCK,
        "block_table": (torch.randperm(requests * blocks, generator=g, device=device) + 1).int().view(requests, blocks),
        "indices": torch.cat(drawn)[:total].sort().values.int(),
        "sink": normal(heads),
        "rope": normal(total, ROPE),
        "scale": DIM**-0.5,
    }


def attention_cost(arguments: dict) -> tuple[int, int]:
    """Bytes and operations that the step demands: distinct rows once, queries and results once."""
    total, heads = arguments["q"].shape[:2]
    requests = len(arguments["start_pos"])
    distinct = sum(len(rows.unique()) for rows in arguments["indices"].view(requests, -1))
    keys = requests * (WINDOW - 1) * 528 + total * 528 + distinct * 288
    return keys + 2 * total * heads * DIM * 2, 4 * total * heads * DIM * (WINDOW + SELECTED)


def _attention(requests: int, rows: int, heads: int) -> Problem:
    from mla_fp4 import triton_attention
    from mla_fp4.reference.attention import sparse_attention

    arguments = attention_arguments(requests, rows, heads, "cuda")
    out = torch.empty_like(arguments["q"])

    def check() -> None:
        host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        few = slice(0, min(4, requests))  # whole requests from the front: the reference is slow
        end = int(host["cu_seqlens"][few.stop])
        if end > 64:
            return  # prefill: the same kernel, checked at decode and by the tests
        host |= {k: host[k][:end] for k in ("new_rows", "indices", "rope")}
        host |= {"q": host["q"][:end].float(), "cu_seqlens": host["cu_seqlens"][: few.stop + 1]}
        host |= {k: host[k][few] for k in ("ring_slot", "start_pos", "lower", "block_table")}
        expected = sparse_attention(**host)
        error = (out[:end].float().cpu() - expected).norm() / expected.norm()
        if not error < 6e-3:
            raise ArithmeticError(f"sparse_attention: relative error {error:.2e} against the reference")

    moved, flops = attention_cost(arguments)
    run = functools.partial(triton_attention.sparse_attention, **arguments, out=out)
    return Problem(run, None, moved, flops, check=check, compute="bf16", cold=True, note="triton")


def index_arguments(requests: int, keys: int, device: str, heads: int = INDEX_HEADS) -> dict:
    """Tensors of index scoring: one query a request over `keys` packed keys each."""
    g = torch.Generator(device).manual_seed(keys)
    blocks = keys // ROWS_PER_BLOCK
    row_bytes = INDEX_DIM // 2 + INDEX_DIM // 32
    shape = (requests * blocks + 1, ROWS_PER_BLOCK * row_bytes)
    pages = torch.randint(0, 256, shape, generator=g, device=device, dtype=torch.uint8)
    # Scales about 1, so that scores stay in range; codes may be anything.
    pages[:, ROWS_PER_BLOCK * INDEX_DIM // 2 :] = 125 + pages[:, ROWS_PER_BLOCK * INDEX_DIM // 2 :] % 4
    return {
        "q": torch.randn(requests, heads, INDEX_DIM, generator=g, device=device),
        "head_weights": torch.randn(requests, heads, generator=g, device=device),
        "pages": pages,
        "rows_per_block": ROWS_PER_BLOCK,
        "block_table": (torch.randperm(requests * blocks, generator=g, device=device) + 1).int().view(requests, blocks),
        "cu_seqlens": torch.arange(requests + 1, device=device).int(),
        "visible": torch.full((requests,), keys, dtype=torch.int32, device=device),
    }


def _index(requests: int, keys: int) -> Problem:
    from mla_fp4 import triton_index
    from mla_fp4.reference.indexer import index_scores

    arguments = index_arguments(requests, keys, "cuda")
    found: list[torch.Tensor] = []

    def native() -> None:
        found[:] = [triton_index.index_scores(**arguments, width=keys)]

    def check() -> None:
        host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        host |= {k: host[k][:1] for k in ("q", "head_weights", "visible", "block_table")}
        expected = index_scores(**{**host, "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)})
        torch.testing.assert_close(found[0][:1].cpu(), expected, rtol=1e-4, atol=1e-3)

    moved = requests * keys * (INDEX_DIM // 2 + INDEX_DIM // 32 + 4)  # keys in, float32 scores out
    flops = 2 * requests * keys * INDEX_HEADS * INDEX_DIM
    return Problem(native, None, moved, flops, check=check, compute="bf16", cold=True, note="triton")


def _attention_case(point: str, requests: int, rows: int, heads: int) -> Case:
    shape = {"requests": requests, "rows": rows, "heads": heads, "dim": DIM, "window": WINDOW, "selected": SELECTED}
    return Case(point, shape, functools.partial(_attention, requests, rows, heads))


BENCHES = [
    Bench(
        "mla_fp4.sparse_attention",
        [
            *(
                _attention_case(f"mla_decode_h{heads}_b{batch}", batch, 1, heads)
                for heads in (8, 16, 32, 64, 128)
                for batch in (1, 8, 32, 128)
            ),
            _attention_case("mla_prefill_h64_q4096", 1, 4096, 64),
        ],
        _SOURCES,
        device="cuda",
    ),
    Bench(
        "mla_fp4.index_scores",
        [
            Case(
                "index_decode_b64_k65536",
                {"requests": 64, "keys": 65536, "heads": INDEX_HEADS, "dim": INDEX_DIM},
                functools.partial(_index, 64, 65536),
            )
        ],
        _SOURCES,
        device="cuda",
    ),
]
