"""The step between two sublayers, and Engram, on an NVIDIA GPU at the width of the released model: bound by bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import cuda_module
from kernel_core.testing import assert_bitwise, assert_close

N, WIDTH = 4, 5120
ROWS = (2 + N) * N
COLUMNS, DIM, TABLE_ROWS = 24, 256, 1 << 21  # 512 MB: beyond the caches
SOURCES = ("csrc/cuda/**/*", "src/mhc_engram/cuda.py")


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def _built(function: str) -> None:
    if cuda_module("mhc_engram._cuda", function) is None:
        raise NotImplementedError(f"{function}: mhc_engram._cuda is not built, and there is no other implementation")


def _step(T: int) -> Problem:
    _built("hc_step")
    import mhc_engram
    from mhc_engram import reference

    X, y = _normal(T, N, WIDTH), _normal(T, WIDTH, seed=1)
    post = torch.full((T, N), 0.1, device="cuda")
    comb = torch.full((T, N, N), 0.25, device="cuda")  # repeated calls keep the size of X
    parameters = _normal(ROWS, N * WIDTH, seed=2) / (N * WIDTH) ** 0.5, _normal(ROWS, seed=3), _normal(3, seed=4).abs()
    rest = *parameters, _normal(T, N, seed=5).abs(), _normal(WIDTH, seed=6)
    out = torch.empty(T, WIDTH, device="cuda")

    def check() -> None:
        a, b = X.clone(), X.double()
        exact = [t.double() for t in (y, post, comb, *rest)]
        made, wanted = mhc_engram.hc_step(a, y, post, comb, *rest), reference.hc_step(b, *exact)
        for actual, expected in zip((a, *made), (b, *wanted), strict=True):
            assert_close(actual, expected.float(), atol=2e-5, rtol=2e-5)

    moved = 2 * X.numel() + 2 * y.numel() + parameters[0].numel() + T * (3 * N + 2 * N * N) + WIDTH
    update, mix = N * WIDTH * (2 * N + 1), WIDTH * (2 * N + 3)
    return Problem(
        lambda: mhc_engram.hc_step(X, y, post, comb, *rest, out=out),
        None,
        4 * moved,
        T * (2 * (ROWS + 1) * N * WIDTH + update + mix),
        peers=[Offer("torch operators", lambda: lambda: reference.hc_step(X, y, post, comb, *rest), "torch")],
        check=check,
        cold=True,
        note="cuda",
    )


@functools.cache
def _table() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(0, 0x7F, (TABLE_ROWS, DIM), generator=g, dtype=torch.uint8, device="cuda")
    scale = torch.randint(110, 130, (TABLE_ROWS, DIM // 32), generator=g, dtype=torch.uint8, device="cuda")
    return codes.view(torch.float8_e4m3fn), scale


def _gather(T: int) -> Problem:
    _built("engram_gather")
    import mhc_engram
    from mhc_engram import reference

    table, scale = _table()
    rows = torch.randint(0, TABLE_ROWS, (T, COLUMNS), generator=torch.Generator("cuda").manual_seed(T), device="cuda")
    out = torch.empty(T, COLUMNS * DIM, device="cuda")

    def library() -> torch.Tensor:
        return reference.engram_gather(table, scale, rows)

    return Problem(
        lambda: mhc_engram.engram_gather(table, scale, rows, out=out),
        None,
        T * COLUMNS * (8 + DIM + DIM // 32 + 4 * DIM),
        0,
        peers=[Offer("torch operators", lambda: library, "torch")],
        check=lambda: assert_bitwise(mhc_engram.engram_gather(table, scale, rows), library()),
        cold=True,
        note="cuda",
    )


def _inject(T: int) -> Problem:
    _built("engram_inject")
    import mhc_engram
    from mhc_engram import reference

    X, kv, weight = _normal(T, N, WIDTH), _normal(T, (N + 1) * WIDTH, seed=1), _normal(N, WIDTH, seed=2)

    def check() -> None:
        a, b = X.clone(), X.double()
        mhc_engram.engram_inject(a, kv, weight)
        reference.engram_inject(b, kv.double(), weight.double(), None)
        assert_close(a, b.float(), atol=2e-5, rtol=2e-5)

    return Problem(
        lambda: mhc_engram.engram_inject(X, kv, weight),
        None,
        4 * (2 * X.numel() + kv.numel() + weight.numel()),
        T * N * WIDTH * 9,
        peers=[Offer("torch operators", lambda: lambda: reference.engram_inject(X, kv, weight, None), "torch")],
        check=check,
        cold=True,
        note="cuda",
    )


def _cases(name: str, tokens: tuple[int, ...], make: Callable[[int], Problem], shape: dict[str, int]) -> list[Case]:
    return [Case(f"{name}_t{T}", {"tokens": T, **shape}, functools.partial(make, T)) for T in tokens]


_STREAMS = {"streams": N, "channels": WIDTH}
BENCHES = [
    Bench(
        "mhc_engram.hc_step",
        _cases(f"mhc_d{WIDTH}", (1, 16, 64, 256, 1024, 4096), _step, _STREAMS),
        SOURCES,
        device="cuda",
    ),
    Bench(
        "mhc_engram.engram_gather",
        _cases("engram_gather", (1, 64, 4096), _gather, {"columns": COLUMNS, "dim": DIM}),
        SOURCES,
        device="cuda",
    ),
    Bench(
        "mhc_engram.engram_inject",
        _cases(f"engram_d{WIDTH}", (1, 64, 4096), _inject, _STREAMS),
        SOURCES,
        device="cuda",
    ),
]
