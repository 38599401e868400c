"""Products with FP8 weights on an NVIDIA GPU at decode sizes: bound by the bytes of the weight.

Beside the kernel run cuBLAS on a bfloat16 copy of the weight (twice the bytes), and the path without kernels, which
expands the weight to float32 at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernel_core import formats
from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import cuda_module

SOURCES = ("csrc/cuda/**/linear*", "csrc/cuda/bindings_linear.cpp", "src/mega_moe/cuda/linear.py")
# Rows and columns of the released model: queries, keys and values, output, shared expert, gate.
_SHAPES = ((5120, 5120), (32768, 1536), (512, 5120), (4608, 5120), (5120, 2304))
_TOKENS = (1, 8, 32, 64)
_CHECKED = 64  # rows of the weight


def _weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=g, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.randint(118, 126, (rows // 32, columns // 32), generator=g, device="cuda").to(torch.uint8)
    return weight, scale


def _bf16(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Callable[[], torch.Tensor]:
    copy, rounded = formats.dequantize_fp8_block(weight, scale).bfloat16(), x.bfloat16()
    return lambda: F.linear(rounded, copy)


def _library(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Callable[[], torch.Tensor]:
    from mega_moe import library

    return lambda: library.linear(x, weight, scale)


def _linear(tokens: int, rows: int, columns: int, terms: int) -> Problem:
    if cuda_module("mega_moe._cuda", "linear") is None:
        raise NotImplementedError("linear: mega_moe._cuda is not built, and there is no other implementation")
    from mega_moe.cuda import linear

    weight, scale = _weight(rows, columns)
    x = torch.randn(tokens, columns, generator=torch.Generator("cuda").manual_seed(tokens), device="cuda")
    out = torch.empty(tokens, rows, device="cuda")

    def check() -> None:
        few = slice(rows - _CHECKED, rows)
        matrix = formats.dequantize_fp8_block(weight[few], scale[few.start // 32 :]).double()
        given = (x.bfloat16() if terms == 1 else x).double()
        error, bound = (out[:, few].double() - given @ matrix.T).abs(), 3e-6 * (given.abs() @ matrix.abs().T)
        if not bool((error <= bound).all()):
            raise ArithmeticError(f"linear: error is {float((error / bound).max()):.2f} of what is allowed")

    return Problem(
        lambda: linear.linear(x, weight, scale, out, terms=terms),
        None,
        weight.numel() + scale.numel() + 4 * tokens * (rows + columns),
        2 * tokens * rows * columns,
        peers=[
            Offer("cuBLAS, bf16 copy", functools.partial(_bf16, x, weight, scale), "torch"),
            Offer("library, float32 copy at each call", functools.partial(_library, x, weight, scale), "torch"),
        ],
        check=check,
        compute="bf16",
        cold=True,
        note="cuda",
    )


def _case(tokens: int, rows: int, columns: int, terms: int) -> Case:
    shape = {"tokens": tokens, "out": rows, "in": columns, "terms": terms}
    make = functools.partial(_linear, tokens, rows, columns, terms)
    return Case(f"linear_{rows}x{columns}_terms{terms}_t{tokens}", shape, make)


BENCHES = [
    Bench(
        "mega_moe.linear",
        [_case(t, *shape, terms) for shape in _SHAPES for terms in (1, 3) for t in _TOKENS],
        SOURCES,
        device="cuda",
    )
]
