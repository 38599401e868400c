"""Sparse attention on an NVIDIA GPU, at the production shapes: 128 + 512 packed keys a row.

Every sample finds cold caches and random rows. The note of a row says which implementation ran; Triton and FlashMLA run
beside it where they can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import peers
import torch

from kernel_core import formats
from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import address, assert_near, cuda_module, multiprocessors, stream

DIM, ROPE, WINDOW, RING, SELECTED, ROWS_PER_BLOCK = 512, 64, 128, 134, 512, 128
START = VISIBLE = 8192
INDEX_DIM, INDEX_HEADS = 128, 32
CHECKED = 4  # rows compared with the reference
LIMIT = 6e-3  # relative error of a bfloat16 result
SOURCES = ("csrc/cuda/**/*", "src/mla_fp4/triton_*.py")
_ADDRESSES = ("q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower", "pages", "block_table",
              "indices", "sink", "rope")  # fmt: skip


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


def compiled(arguments: dict, out: torch.Tensor) -> Callable[[], None] | None:
    """One call of the CUDA C++ kernel that the library chooses; None where it is not built."""
    module = cuda_module("mla_fp4._cuda", "sparse_attention")
    if module is None:
        return None
    rows, heads = arguments["q"].shape[:2]

    def run() -> None:
        module.sparse_attention(
            *(address(arguments[name]) for name in _ADDRESSES),
            out=address(out),
            rows=rows,
            heads=heads,
            batch=len(arguments["start_pos"]),
            slots=arguments["ring"].shape[0],
            ring_rows=arguments["ring"].shape[1],
            window=arguments["window"],
            blocks=arguments["pages"].shape[0],
            rows_per_block=arguments["rows_per_block"],
            table_width=arguments["block_table"].shape[1],
            selected=arguments["indices"].shape[1],
            scale=arguments["scale"],
            multiprocessors=multiprocessors(),
            stream=stream(),
        )

    return run


def row_alone(arguments: dict, row: int) -> dict:
    """The problem of one row on the CPU: its window in a ring of its own, its pages next to each other."""
    request = int(torch.searchsorted(arguments["cu_seqlens"], row, right=True)) - 1
    first, start = int(arguments["cu_seqlens"][request]), int(arguments["start_pos"][request])
    position = start + row - first
    ring = arguments["ring"][arguments["ring_slot"][request].long()].clone()
    size = len(ring)
    new = torch.arange(max(start, position - WINDOW + 1), position, device=ring.device)  # keys of this very step
    ring[new % size] = arguments["new_rows"][first + new - start]
    blocks = arguments["block_table"][request].long()
    alone = {
        **{name: arguments[name][row : row + 1] for name in ("q", "new_rows", "indices", "rope")},
        "ring": ring[None],
        "ring_slot": torch.zeros(1, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
        "start_pos": torch.tensor([position]),
        "lower": arguments["lower"][request : request + 1],
        "pages": arguments["pages"][blocks],
        "block_table": torch.arange(len(blocks), dtype=torch.int32)[None],
        **{name: arguments[name] for name in ("window", "rows_per_block", "sink", "scale")},
    }
    alone["q"] = alone["q"].float()
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in alone.items()}


def _check(arguments: dict, out: torch.Tensor) -> None:
    from mla_fp4.reference.attention import sparse_attention

    rows = len(out)
    for row in sorted({0, rows // 3, rows // 2, rows - 1})[:CHECKED]:
        expected = sparse_attention(**row_alone(arguments, row))
        assert_near(f"sparse_attention, row {row}", out[row : row + 1], expected, LIMIT)


def _triton(arguments: dict, out: torch.Tensor) -> Callable[[], object]:
    from mla_fp4 import triton_attention

    return functools.partial(triton_attention.sparse_attention, **arguments, out=out)


def _checked_triton(arguments: dict) -> Callable[[], object]:
    out = torch.empty_like(arguments["q"])
    run = _triton(arguments, out)
    run()
    _check(arguments, out)
    return run


def _flash_mla(arguments: dict) -> Offer:
    """FlashMLA on as many rows: decode from 584-byte rows, prefill from bfloat16 rows that hold both kinds of keys."""
    indices, heads = arguments["indices"], arguments["q"].shape[1]
    if len(arguments["start_pos"]) == len(indices):
        return peers.flash_mla_decode(indices, VISIBLE, heads, WINDOW)
    rows = len(indices)
    near = VISIBLE + torch.arange(rows, device="cuda")[:, None] + torch.arange(WINDOW, device="cuda")
    return peers.flash_mla_prefill(torch.cat([near.int(), indices], dim=1), VISIBLE + WINDOW + rows, heads)


def _attention(requests: int, rows: int, heads: int) -> Problem:
    arguments = attention_arguments(requests, rows, heads, "cuda")
    out = torch.empty_like(arguments["q"])
    moved, flops = attention_cost(arguments)
    run = compiled(arguments, out)
    others = [Offer("triton", functools.partial(_checked_triton, arguments), "triton")] if run is not None else []
    return Problem(
        run or _triton(arguments, out),
        None,
        moved,
        flops,
        peers=[*others, _flash_mla(arguments)],
        check=functools.partial(_check, arguments, out),
        compute="bf16",
        cold=True,
        note="cuda" if run is not None else "triton",
    )


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


def _case(point: str, requests: int, rows: int, heads: int) -> Case:
    shape = {"requests": requests, "rows": rows, "heads": heads, "dim": DIM, "window": WINDOW, "selected": SELECTED}
    return Case(point, shape, functools.partial(_attention, requests, rows, heads))


BENCHES = [
    Bench(
        "mla_fp4.sparse_attention",
        [
            *(
                _case(f"mla_decode_h{heads}_b{batch}", batch, 1, heads)
                for heads in (8, 16, 32, 64, 128)
                for batch in (1, 8, 32, 128, 512)
            ),
            *(_case(f"mla_prefill_h{heads}_q4096", 1, 4096, heads) for heads in (64, 128)),
        ],
        SOURCES,
        device="cuda",
    )
]
