"""Attention over the sliding window alone on an NVIDIA GPU, one request's prefill: layers without selected rows.

The dense kernel, the sparse one without a selected row, Triton, and FlashMLA's sparse prefill over the same 128 keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import peers
import torch
from bench_attention_cuda import DIM, LIMIT, START, WINDOW, attention_arguments, compiled, row_alone

from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import address, assert_near, cuda_module, multiprocessors, stream

SOURCES = ("csrc/cuda/**/*", "src/mla_fp4/triton_attention.py")
_ADDRESSES = ("q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower", "sink", "rope")


def window_arguments(rows: int, heads: int, device: str) -> dict:
    """Arguments of a step of one request, `START` tokens in, that selects nothing."""
    arguments = attention_arguments(1, rows, heads, device, visible=1024)
    return arguments | {"indices": arguments["indices"][:, :0].contiguous()}


def _dense(arguments: dict, out: torch.Tensor) -> Callable[[], None] | None:
    module = cuda_module("mla_fp4._cuda", "window_prefill")
    if module is None:
        return None
    rows, heads = arguments["q"].shape[:2]
    run_rows = module.window_run_rows(rows=rows, heads=heads, batch=1, multiprocessors=multiprocessors())

    def run() -> None:
        module.window_prefill(
            **{name: address(arguments[name]) for name in _ADDRESSES},
            out=address(out),
            rows=rows,
            heads=heads,
            batch=1,
            slots=arguments["ring"].shape[0],
            ring_rows=arguments["ring"].shape[1],
            window=WINDOW,
            scale=arguments["scale"],
            run_rows=run_rows,
            stream=stream(),
        )

    return run


def _triton(arguments: dict, out: torch.Tensor) -> Callable[[], object]:
    from mla_fp4 import triton_attention

    return functools.partial(triton_attention.sparse_attention, **arguments, out=out)


def _sparse(arguments: dict, out: torch.Tensor) -> Callable[[], object]:
    run = compiled(arguments, out)
    if run is None:
        raise NotImplementedError("mla_fp4._cuda has no sparse_attention")
    return run


def _check(arguments: dict, out: torch.Tensor) -> None:
    from mla_fp4.reference.attention import sparse_attention

    rows = len(out)
    for row in sorted({0, 100, rows // 2, rows - 1}):
        expected = sparse_attention(**row_alone(arguments, row))
        assert_near(f"window_attention, row {row}", out[row : row + 1], expected, LIMIT)


def _checked(make: Callable[[dict, torch.Tensor], Callable[[], object]], arguments: dict) -> Callable[[], object]:
    out = torch.empty_like(arguments["q"])
    run = make(arguments, out)
    run()
    _check(arguments, out)
    return run


def _window(rows: int, heads: int) -> Problem:
    arguments = window_arguments(rows, heads, "cuda")
    out = torch.empty_like(arguments["q"])
    run: Callable[[], object] | None = _dense(arguments, out)
    sparse = Offer("sparse kernel", functools.partial(_checked, _sparse, arguments))
    triton = Offer("triton", functools.partial(_checked, _triton, arguments), "triton")
    own = [sparse, triton]
    note = "cuda"
    if run is None:  # what the library would run
        own, note = [triton], "sparse kernel"
        run = compiled(arguments, out)
    if run is None:
        own, note = [], "triton"
        run = _triton(arguments, out)
    near = torch.arange(rows, device="cuda")[:, None] + torch.arange(WINDOW, device="cuda")
    return Problem(
        run,
        None,
        (WINDOW - 1 + rows) * 528 + 2 * out.numel() * 2,
        4 * rows * heads * DIM * WINDOW,
        peers=[*own, peers.flash_mla_prefill(near.int(), WINDOW + rows, heads)],
        check=functools.partial(_check, arguments, out),
        compute="bf16",
        cold=True,
        note=note,
    )


def _case(rows: int, heads: int) -> Case:
    shape = {"rows": rows, "heads": heads, "dim": DIM, "window": WINDOW, "start": START}
    return Case(f"window_prefill_h{heads}_q{rows}", shape, functools.partial(_window, rows, heads))


BENCHES = [
    Bench("mla_fp4.window_attention", [_case(4096, 64), _case(16384, 64), _case(4096, 128)], SOURCES, device="cuda")
]
