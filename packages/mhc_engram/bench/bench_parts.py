"""The three parts of a hyper-connection step, each alone, at the width of v41-mini."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import mhc_engram
from kernel_core.bench import Bench, Case, Problem
from kernel_core.testing import assert_close
from mhc_engram import reference

N, WIDTH = 4, 256
ROWS = (2 + N) * N


def _coefficients(T: int) -> Problem:
    g = torch.Generator().manual_seed(0)
    fn = torch.randn(ROWS, N * WIDTH, generator=g) / (N * WIDTH) ** 0.5
    arguments = torch.randn(T, N, WIDTH, generator=g), fn, torch.randn(ROWS, generator=g), torch.rand(3, generator=g)

    def check() -> None:
        pairs = zip(mhc_engram.hc_coefficients(*arguments), reference.hc_coefficients(*arguments), strict=True)
        for actual, expected in pairs:
            assert_close(actual, expected, atol=2e-5, rtol=2e-5)

    return Problem(
        native=lambda: mhc_engram.hc_coefficients(*arguments),
        reference=lambda: reference.hc_coefficients(*arguments),
        bytes=4 * (T * N * WIDTH + fn.numel() + T * ROWS),
        flops=2 * T * (ROWS + 1) * N * WIDTH,
        check=check,
    )


def _mix(T: int) -> Problem:
    g = torch.Generator().manual_seed(0)
    arguments = torch.randn(T, N, WIDTH, generator=g), torch.rand(T, N, generator=g), torch.rand(WIDTH, generator=g)
    return Problem(
        native=lambda: mhc_engram.hc_mix(*arguments),
        reference=lambda: reference.hc_mix(*arguments),
        bytes=4 * T * (N + 1) * WIDTH,
        flops=T * WIDTH * (2 * N + 3),
        check=lambda: assert_close(mhc_engram.hc_mix(*arguments), reference.hc_mix(*arguments), atol=2e-5, rtol=2e-5),
    )


def _update(T: int) -> Problem:
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(T, N, WIDTH, generator=g), torch.randn(T, WIDTH, generator=g)
    post, comb = torch.full((T, N), 0.1), torch.full((T, N, N), 0.25)  # repeated calls keep the size of X

    def check() -> None:
        a, b = X.clone(), X.clone()
        mhc_engram.hc_update(a, y, post, comb)
        reference.hc_update(b, y, post, comb)
        assert_close(a, b, atol=2e-5, rtol=2e-5)

    return Problem(
        native=lambda: mhc_engram.hc_update(X, y, post, comb),
        reference=lambda: reference.hc_update(X, y, post, comb),
        bytes=4 * T * (2 * N + 1) * WIDTH,
        flops=T * N * WIDTH * (2 * N + 1),
        check=check,
    )


def _cases(name: str, make: Callable[[int], Problem]) -> list[Case]:
    shape = {"streams": N, "channels": WIDTH}
    return [Case(f"{name}_d256_t{T}", {"tokens": T, **shape}, functools.partial(make, T)) for T in (1, 512)]


BENCHES = [
    Bench("mhc_engram.hc_coefficients", _cases("hc_coefficients", _coefficients)),
    Bench("mhc_engram.hc_mix", _cases("hc_mix", _mix)),
    Bench("mhc_engram.hc_update", _cases("hc_update", _update)),
]
