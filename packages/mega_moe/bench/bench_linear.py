"""Dense products on stored weights beside torch's float32 product on an expanded copy."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

import mega_moe
from kernel_core import using
from kernel_core.bench import Bench, Case, Peer, Problem
from mega_moe import reference as semantics

NOTE = "float32 result; with AMX by three exact bfloat16 products, so a fraction can pass the float32 bound"


def _weight(kind: str, rows: int, columns: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    value = torch.randn(rows, columns, generator=g)
    if kind == "bf16":
        return value.bfloat16(), None
    scale = torch.randint(110, 116, (rows // 32, columns // 32), dtype=torch.uint8, generator=g)
    return (value * 110).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _problem(kind: str, tokens: int, rows: int, columns: int) -> Problem:
    g = torch.Generator().manual_seed(rows + columns)
    weight, scale = _weight(kind, rows, columns, g)
    x, out = torch.randn(tokens, columns, generator=g), torch.empty(tokens, rows)
    expanded = semantics.dequantize(weight, scale)

    def reference() -> torch.Tensor:
        with using("reference"):
            return mega_moe.linear(x, weight, scale)

    def check() -> None:
        expected = F.linear(x, expanded)
        torch.testing.assert_close(out, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)

    scale_bytes = 0 if scale is None else scale.numel()
    return Problem(
        native=lambda: mega_moe.linear(x, weight, scale, out=out),
        reference=reference if rows * columns < 1 << 20 else None,
        bytes=weight.nbytes + scale_bytes + 4 * tokens * (rows + columns),
        flops=2 * tokens * rows * columns,
        peers=[Peer("F.linear on a float32 copy", f"torch {torch.__version__}", lambda: F.linear(x, expanded))],
        check=check,
        note=NOTE,
    )


def _case(kind: str, tokens: int, rows: int, columns: int) -> Case:
    shape = {"tokens": tokens, "out": rows, "in": columns, "weight": kind}
    return Case(
        f"linear_{rows}x{columns}_{kind}_t{tokens}", shape, functools.partial(_problem, kind, tokens, rows, columns)
    )


SMALL = [("fp8", 128, 256), ("fp8", 2048, 128), ("fp8", 512, 256), ("fp8", 256, 128), ("bf16", 4096, 256)]
LARGE = [("fp8", 5120, 1024), ("bf16", 1024, 5120)]

BENCHES = [
    Bench(
        "mega_moe.linear",
        [_case(kind, t, o, i) for kind, o, i in SMALL for t in (1, 4, 16, 64, 512)]
        + [_case(kind, t, o, i) for kind, o, i in LARGE for t in (1, 16, 128)],
    )
]
