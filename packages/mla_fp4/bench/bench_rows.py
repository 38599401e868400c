"""Cache rows (norm, rotation, quantisation) of one token and of a prefill chunk, and the pooling before them."""

from __future__ import annotations

import functools

import torch

import mla_fp4
from kernel_core import using
from kernel_core.bench import Bench, Case, Problem

DIM, ROPE = 512, 64
ROW_BYTES = {"main": 288, "window": 528}


def _rows(tokens: int, format: str) -> Problem:
    g = torch.Generator().manual_seed(tokens)
    angle = torch.randn(tokens, ROPE // 2, generator=g)
    run = functools.partial(
        mla_fp4.kv_rows,
        torch.randn(tokens, DIM, generator=g),
        torch.rand(DIM, generator=g),
        1e-6,
        torch.cat([angle.cos(), angle.sin()], dim=1),
        format=format,
        round_bf16=True,
    )

    def reference() -> torch.Tensor:
        with using("reference"):
            return run()

    def check() -> None:
        assert (run() != reference()).float().mean() < 0.01

    return Problem(
        native=run,
        reference=reference,
        bytes=tokens * (DIM * 4 + ROPE * 4 + ROW_BYTES[format]),
        flops=tokens * DIM * 6,
        check=check,
    )


def _pool(tokens: int) -> Problem:
    g = torch.Generator().manual_seed(tokens)
    arguments = (
        torch.randn(tokens, DIM, generator=g),
        torch.randn(tokens, DIM, generator=g),
        torch.zeros(2, 7, 2, DIM),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([0]),
    )

    def reference() -> torch.Tensor:
        with using("reference"):
            return mla_fp4.compress(*arguments)

    return Problem(
        native=functools.partial(mla_fp4.compress, *arguments),
        reference=reference,
        bytes=tokens * DIM * 4 * 2 + tokens // 2 * DIM * 4,
        flops=tokens * DIM * 12,
        check=lambda: torch.testing.assert_close(mla_fp4.compress(*arguments), reference(), atol=1e-6, rtol=1e-6),
    )


def _case(format: str, tokens: int) -> Case:
    shape = {"tokens": tokens, "dim": DIM, "format": format}
    return Case(f"rows_{format}_t{tokens}", shape, functools.partial(_rows, tokens, format))


BENCHES = [
    Bench("mla_fp4.kv_rows", [_case(format, tokens) for format in ROW_BYTES for tokens in (1, 16, 512)]),
    Bench(
        "mla_fp4.compress",
        [Case(f"pool_t{t}", {"tokens": t, "dim": DIM}, functools.partial(_pool, t)) for t in (2, 512)],
    ),
]
