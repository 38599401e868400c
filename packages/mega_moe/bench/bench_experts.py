"""Fused experts: the small model at decode and prefill, and the released width, where weights come from memory."""

from __future__ import annotations

import functools
import itertools

import torch

import mega_moe
from kernel_core import using
from kernel_core.bench import Bench, Case, Problem

NOTE = "float32 result; with AMX by three exact bfloat16 products"


def _bytes(g: torch.Generator, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=g)


def _mxfp4(g: torch.Generator, experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = _bytes(g, experts, rows, columns // 2)
    scales = _bytes(g, experts, rows, columns // 32, low=113, high=118)
    mega_moe.advise_huge_pages(codes, scales)
    return codes, scales


def _fp8(g: torch.Generator, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = (torch.randn(rows, columns, generator=g) * 110).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, _bytes(g, rows // 32, columns // 32, low=109, high=113)


def _problem(tokens: int, experts: int, top_k: int, d: int, inter: int, shared: bool, compare: bool) -> Problem:
    g = torch.Generator().manual_seed(tokens)
    packed = (*_mxfp4(g, experts, 2 * inter, d), *_mxfp4(g, experts, d, inter))
    both = mega_moe.SharedExpert(*_fp8(g, 2 * inter, d), *_fp8(g, d, inter)) if shared else None
    x, weights = torch.randn(tokens, d, generator=g) * 8, torch.rand(tokens, top_k, generator=g)
    # Every call takes another routing, so that at real width no expert stays in a cache from one call to the next.
    routings = [
        torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]).int() for _ in range(8)
    ]
    turns, out = itertools.cycle(routings), torch.empty(tokens, d)

    def native() -> None:
        mega_moe.fused_experts(x, next(turns), weights, *packed, shared=both, out=out)

    def reference() -> torch.Tensor:
        with using("reference"):
            return mega_moe.fused_experts(x, routings[0], weights, *packed, shared=both)

    def check() -> None:
        got = mega_moe.fused_experts(x, routings[0], weights, *packed, shared=both)
        expected = reference()
        torch.testing.assert_close(got, expected, atol=2e-6 * expected.abs().max().item(), rtol=1e-5)

    active = sum(len(ids.unique()) for ids in routings) / len(routings)
    weight_bytes = active * 3 * d * inter * 17 / 32 + (3 * d * inter if shared else 0)
    return Problem(
        native=native,
        reference=reference if compare else None,
        bytes=round(weight_bytes) + 2 * tokens * d * 4,
        flops=2 * 3 * d * inter * tokens * (top_k + shared),
        check=check if compare else None,
        note=f"{NOTE}; {active:.1f} experts active",
    )


def _case(point: str, tokens: int, compare: bool = True, **sizes: int) -> Case:
    shape = {"tokens": tokens, **sizes}
    return Case(point, shape, functools.partial(_problem, tokens, compare=compare, **sizes))


MINI = {"experts": 12, "top_k": 2, "d": 256, "inter": 64, "shared": True}
REAL = {"experts": 24, "top_k": 6, "d": 5120, "inter": 2304, "shared": False}

BENCHES = [
    Bench(
        "mega_moe.fused_experts",
        [_case(f"moe_mini_q{t}", t, **MINI) for t in (1, 4, 16, 64, 512)]
        + [_case(f"moe_5120x2304_b{t}", t, compare=False, **REAL) for t in (1, 2, 4, 8, 16)],
    )
]
