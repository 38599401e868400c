"""The grouped output projection: one product a group of heads, beside torch's batched float32 product."""

from __future__ import annotations

import functools

import torch

import mega_moe
from kernel_core import using
from kernel_core.bench import Bench, Case, Peer, Problem
from mega_moe import reference as semantics


def _problem(tokens: int, groups: int, rows: int, columns: int) -> Problem:
    g = torch.Generator().manual_seed(rows + columns)
    weight = (torch.randn(groups * rows, columns, generator=g) * 110).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.randint(110, 116, (groups * rows // 32, columns // 32), dtype=torch.uint8, generator=g)
    x = torch.randn(tokens, groups, columns, generator=g)
    expanded = semantics.dequantize(weight, scale).view(groups, rows, columns)

    def batched() -> torch.Tensor:
        return torch.einsum("tgi,goi->tgo", x, expanded)

    def reference() -> torch.Tensor:
        with using("reference"):
            return mega_moe.grouped_linear(x, weight, scale)

    def check() -> None:
        expected = batched()
        limit = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(mega_moe.grouped_linear(x, weight, scale), expected, atol=limit, rtol=1e-5)

    return Problem(
        native=lambda: mega_moe.grouped_linear(x, weight, scale),
        reference=reference,
        bytes=weight.nbytes + scale.numel() + 4 * tokens * groups * (rows + columns),
        flops=2 * tokens * groups * rows * columns,
        peers=[Peer("einsum on a float32 copy", f"torch {torch.__version__}", batched)],
        check=check,
    )


def _case(tokens: int, groups: int, rows: int, columns: int) -> Case:
    shape = {"tokens": tokens, "groups": groups, "out": rows, "in": columns}
    point = f"grouped_{groups}x{rows}x{columns}_t{tokens}"
    return Case(point, shape, functools.partial(_problem, tokens, groups, rows, columns))


BENCHES = [Bench("mega_moe.grouped_linear", [_case(t, 2, 64, 1024) for t in (1, 16, 512)])]
