"""Window attention in Triton and the ring store on an NVIDIA GPU. The dense CUDA C++ kernel is timed in `mla_fp4`."""

from __future__ import annotations

import functools

import torch

from kernel_core import formats, using
from kernel_core.bench import Bench, Case, Problem
from kernel_core.bench.device import address, assert_near, cuda_module, stream

DIM, ROPE, WINDOW, RING, START, ROW = 512, 64, 128, 134, 8192, 528
CHECKED = 64
SOURCES = ("csrc/cuda/**/*", "src/swa_replay/triton_*.py")


def window_arguments(requests: int, rows: int, heads: int, device: str) -> dict:
    """Tensors of a step whose windows are full, q in bfloat16."""
    g = torch.Generator(device).manual_seed(requests * rows + heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device)

    total = requests * rows
    return {
        "q": normal(total, heads, DIM).bfloat16(),
        "new_rows": formats.quantize_window(normal(total, DIM)),
        "ring": formats.quantize_window(normal(requests + 1, RING, DIM)),
        "ring_slot": torch.arange(1, requests + 1, device=device).int(),
        "cu_seqlens": torch.arange(0, total + 1, rows, device=device).int(),
        "start_pos": torch.full((requests,), START, device=device),
        "lower": torch.zeros(requests, dtype=torch.int64, device=device),
        "window": WINDOW,
        "sink": normal(heads),
        "rope": normal(total, ROPE),
        "scale": DIM**-0.5,
    }


def first_rows(arguments: dict, count: int) -> dict:
    """The problem of the first request's first `count` rows, on the CPU."""
    host = {k: v[:1] if k in ("ring_slot", "start_pos", "lower") else v for k, v in arguments.items()}
    host |= {k: arguments[k][:count] for k in ("q", "new_rows", "rope")}
    host |= {"ring": arguments["ring"][:2], "cu_seqlens": torch.tensor([0, count], dtype=torch.int32)}
    host["q"] = host["q"].float()
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in host.items()}


def _attention(requests: int, rows: int, heads: int) -> Problem:
    import swa_replay
    from swa_replay import triton_attention

    arguments = window_arguments(requests, rows, heads, "cuda")
    out = torch.empty_like(arguments["q"])

    def check() -> None:
        count = min(rows, CHECKED)
        with using("reference"):
            expected = swa_replay.window_attention(**first_rows(arguments, count))
        assert_near("window_attention", out[:count], expected, 6e-3)

    return Problem(
        functools.partial(triton_attention.window_attention, **arguments, out=out),
        None,
        (requests * (WINDOW - 1) + requests * rows) * ROW + 2 * out.numel() * 2,
        4 * requests * rows * heads * DIM * WINDOW,
        check=check,
        compute="bf16",
        cold=True,
        note="triton",
    )


def _store(requests: int, rows: int) -> Problem:
    import swa_replay

    module = cuda_module("swa_replay._cuda", "store_window")
    if module is None:
        raise NotImplementedError("store_window: swa_replay._cuda is not built, and there is no other implementation")
    step = window_arguments(requests, rows, 1, "cuda")
    floor = torch.zeros(requests, dtype=torch.int64, device="cuda")
    names = ("new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos")
    arguments = [*(step[name] for name in names), floor]
    before = step["ring"].cpu()

    def run() -> None:
        module.store_window(
            *(address(t) for t in arguments), requests * rows, ROW, requests, requests + 1, RING, stream()
        )

    def check() -> None:
        host = [t.cpu() for t in arguments]
        host[1] = before
        with using("reference"):
            swa_replay.store_window(*host)
        if not torch.equal(step["ring"].cpu(), before):
            raise ArithmeticError("store_window: the rings differ from the reference's")

    return Problem(run, None, 2 * requests * min(rows, RING) * ROW, 0, check=check, cold=True, note="cuda")


def _shape(requests: int, rows: int, **more: int) -> dict[str, int]:
    return {"requests": requests, "rows": rows, **more, "dim": DIM, "window": WINDOW}


BENCHES = [
    Bench(
        "swa_replay.window_attention",
        [
            Case(point, _shape(b, n, heads=h), functools.partial(_attention, b, n, h))
            for point, b, n, h in (
                ("window_decode_h64_b128", 128, 1, 64),
                ("window_prefill_h64_q4096", 1, 4096, 64),
                ("window_prefill_h64_q16384", 1, 16384, 64),
            )
        ],
        SOURCES,
        device="cuda",
    ),
    Bench(
        "swa_replay.store_window",
        [
            Case(point, _shape(b, n), functools.partial(_store, b, n))
            for point, b, n in (("window_store_b512", 512, 1), ("window_store_b64_q128", 64, 128))
        ],
        SOURCES,
        device="cuda",
    ),
]
