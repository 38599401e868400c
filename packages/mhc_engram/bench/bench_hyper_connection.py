"""The step between two sublayers, at the widths of v41-mini (256) and of the released model (5120)."""

from __future__ import annotations

import functools

import torch

import mhc_engram
from kernel_core.bench import Bench, Case, Problem
from kernel_core.testing import assert_close
from mhc_engram import reference

N = 4
ROWS = (2 + N) * N


def _step(T: int, d: int) -> Problem:
    g = torch.Generator().manual_seed(0)
    rand, randn = functools.partial(torch.rand, generator=g), functools.partial(torch.randn, generator=g)
    X, y, post = randn(T, N, d), randn(T, d), torch.full((T, N), 0.1)
    comb = torch.full((T, N, N), 0.25)  # repeated calls keep the size of X
    parameters = randn(ROWS, N * d) / (N * d) ** 0.5, randn(ROWS), rand(3) + 0.5
    rest = *parameters, rand(T, N), rand(d) + 0.5
    out = torch.empty(T, d)

    def check() -> None:
        a, b = X.clone(), X.clone()
        for actual, expected in zip(
            (a, *mhc_engram.hc_step(a, y, post, comb, *rest)),
            (b, *reference.hc_step(b, y, post, comb, *rest)),
            strict=True,
        ):
            assert_close(actual, expected, atol=2e-5, rtol=2e-5)

    moved = 2 * X.numel() + 2 * y.numel() + parameters[0].numel() + T * (3 * N + 2 * N * N) + d
    update, mix = N * d * (2 * N + 1), d * (2 * N + 3)
    return Problem(
        native=lambda: mhc_engram.hc_step(X, y, post, comb, *rest, out=out),
        reference=lambda: reference.hc_step(X, y, post, comb, *rest),
        bytes=4 * moved,
        flops=T * (2 * (ROWS + 1) * N * d + update + mix),
        check=check,
    )


BENCHES = [
    Bench(
        "mhc_engram.hc_step",
        [
            Case(f"mhc_d{d}_t{T}", {"tokens": T, "streams": N, "channels": d}, functools.partial(_step, T, d))
            for d in (256, 5120)
            for T in (1, 16, 512)
        ],
    )
]
