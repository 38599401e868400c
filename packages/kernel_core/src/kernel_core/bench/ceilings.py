"""Ceilings of the CPU, measured in the same run as the kernels: a fraction of a data sheet would prove nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Ceilings:
    """Best rates seen. `None` is a rate that was not measured or that the machine does not have.

    read_gbps: bytes read, in 10^9 a second, from a buffer beyond the caches. copy_gbps: bytes read plus bytes
    written. f32_tflops and bf16_tflops: 10^12 operations a second, a multiply-add being two; bf16 is the tile unit.
    h2d_gbps: bytes from the host to a GPU. link_gbps: bytes from a GPU to another's memory, while all GPUs send.
    """

    read_gbps: float | None = None
    copy_gbps: float | None = None
    f32_tflops: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    h2d_gbps: float | None = None
    link_gbps: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """The `ceilings` object of a ledger row."""
        return asdict(self)


def ceilings(*, megabytes: int = 512, repeats: int = 5) -> Ceilings:
    """Measure this CPU on the threads that torch uses; takes about two seconds and `megabytes` of memory."""
    from kernel_core import _native

    buffer = torch.ones(megabytes << 18)
    half = buffer.numel() // 2
    start, middle = buffer.data_ptr(), buffer.data_ptr() + 4 * half
    read = _best(lambda: _native.read_all(start, buffer.numel()), repeats)
    copy = _best(lambda: _native.copy_all(start, middle, half), repeats)
    return Ceilings(
        read_gbps=_round(buffer.numel() * 4 / read / 1e9),
        copy_gbps=_round(half * 8 / copy / 1e9),
        f32_tflops=_round(_peak(_native.fma_flops, repeats)),
        bf16_tflops=_round(_peak(_native.amx_bf16_flops, repeats)),
    )


def _best(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])  # the first run touches the pages


def _peak(work: Callable[[int], int], repeats: int, rounds: int = 200_000) -> float | None:
    if work(1) == 0:
        return None
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        operations = work(rounds)
        best = max(best, operations / (time.perf_counter() - start) / 1e12)
    return best


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
