"""Engram: hashes, look-up of 24 rows of 256 values a token, gated addition to four streams."""

from __future__ import annotations

import functools

import torch

import mhc_engram
from kernel_core.bench import Bench, Case, Problem
from kernel_core.testing import assert_bitwise, assert_close
from mhc_engram import reference

N, ORDERS, HEADS, DIM = 4, 3, 8, 256
COLUMNS = ORDERS * HEADS
TABLE_ROWS = 1 << 20  # 256 MB: beyond the caches
TOKENS = (1, 16, 512)


def _rows(T: int) -> Problem:
    primes = mhc_engram.engram_primes(1, ORDERS, HEADS, 16_000_000)[0]
    arguments = (
        torch.randint(0, 99_092, (T,)), torch.zeros(T, dtype=torch.bool), torch.full((1, ORDERS), -1),
        torch.tensor([0, T], dtype=torch.int32), mhc_engram.engram_multipliers(1, 99_092), primes,
        mhc_engram.engram_offsets(primes), 2,
    )  # fmt: skip
    return Problem(
        native=lambda: mhc_engram.engram_rows(*arguments),
        reference=lambda: reference.engram_rows(*arguments),
        bytes=T * (9 + 8 * COLUMNS),
        flops=0,
        check=lambda: assert_bitwise(mhc_engram.engram_rows(*arguments), reference.engram_rows(*arguments)),
    )


@functools.cache
def _table() -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 0x7F, (TABLE_ROWS, DIM), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, torch.randint(110, 130, (TABLE_ROWS, DIM // 32), dtype=torch.uint8)


def _gather(T: int) -> Problem:
    table, scale = _table()
    rows = torch.randint(0, TABLE_ROWS, (T, COLUMNS))
    out = torch.empty(T, COLUMNS * DIM)
    return Problem(
        native=lambda: mhc_engram.engram_gather(table, scale, rows, out=out),
        reference=lambda: reference.engram_gather(table, scale, rows),
        bytes=T * COLUMNS * (8 + DIM + DIM // 32 + 4 * DIM),
        flops=0,
        check=lambda: assert_bitwise(
            mhc_engram.engram_gather(table, scale, rows), reference.engram_gather(table, scale, rows)
        ),
    )


def _inject(T: int, d: int) -> Problem:
    X, kv, qk = torch.randn(T, N, d), torch.randn(T, (N + 1) * d), torch.randn(N, d)
    dead = torch.zeros(T, dtype=torch.bool)

    def check() -> None:
        a, b = X.clone(), X.clone()
        mhc_engram.engram_inject(a, kv, qk, dead)
        reference.engram_inject(b, kv, qk, dead)
        assert_close(a, b, atol=2e-5, rtol=2e-5)

    return Problem(
        native=lambda: mhc_engram.engram_inject(X, kv, qk, dead),
        reference=lambda: reference.engram_inject(X, kv, qk, dead),
        bytes=4 * (2 * X.numel() + kv.numel() + qk.numel()),
        flops=T * N * d * 9,
        check=check,
    )


BENCHES = [
    Bench(
        "mhc_engram.engram_rows",
        [Case(f"engram_rows_t{T}", {"tokens": T, "columns": COLUMNS}, functools.partial(_rows, T)) for T in TOKENS],
    ),
    Bench(
        "mhc_engram.engram_gather",
        [
            Case(f"engram_gather_t{T}", {"tokens": T, "columns": COLUMNS, "dim": DIM}, functools.partial(_gather, T))
            for T in TOKENS
        ],
    ),
    Bench(
        "mhc_engram.engram_inject",
        [
            Case(f"engram_d{d}_t{T}", {"tokens": T, "streams": N, "channels": d}, functools.partial(_inject, T, d))
            for d in (256, 5120)
            for T in TOKENS
        ],
    ),
]
