"""Timing on an NVIDIA GPU: device events, caches flushed before each call, launches hidden behind a spin.

A kernel of some microseconds is over before the host has launched the next one. So the host first has the device flush
and spin, launches start event, kernel and stop event while it does, and the events then enclose the kernel alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernel_core.bench.ceilings import Ceilings
from kernel_core.bench.timing import Timing

_FLUSH_BYTES = 2 * 60 << 20  # twice the second-level cache of the largest Hopper part
_SPIN_US = 500.0  # longer than the host needs for the launches of one sample, Python and all
_CALIBRATION = 1_000_000  # cycles
_WARM_UP = 3


class Clock(Protocol):
    """What a sample needs of a device."""

    def flush(self) -> None: ...
    def spin(self) -> None: ...
    def mark(self) -> Any: ...
    def synchronize(self) -> None: ...
    def microseconds(self, start: Any, stop: Any) -> float: ...


class CudaClock:
    """Events of the current CUDA device.

    The flush reads data that are not zero (zeros can be cheaper to move). It reads and does not write: lines left dirty
    would have to be written back while the timed kernel fetches its own, and would count against it.
    """

    def __init__(self) -> None:
        self._buffer = torch.randn(_FLUSH_BYTES // 4, device="cuda")
        self._sink = torch.empty((), device="cuda")
        self._cycles = _CALIBRATION
        self.spin()  # loads the kernel
        start = self.mark()
        self.spin()
        stop = self.mark()
        self.synchronize()
        self._cycles = int(_CALIBRATION * _SPIN_US / self.microseconds(start, stop))

    def flush(self) -> None:
        torch.amax(self._buffer, dim=0, out=self._sink)

    def spin(self) -> None:
        torch.cuda._sleep(self._cycles)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def microseconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return start.elapsed_time(stop) * 1e3


@dataclass(frozen=True)
class _Sample:
    name: str
    start: Any
    stop: Any


def interleave_cuda(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    budget_s: float = 2.0,
    min_runs: int = 20,
    max_runs: int = 200,
    cold: bool = True,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Time callables A, B, C, A, B, C, ... on the device until `budget_s` of host time is spent.

    Every call is a sample of its own; with `cold` the second-level cache holds nothing of it. An exception of a
    callable is raised to the caller. Nothing is read back before all samples of a turn have ended.
    """
    clock = clock or CudaClock()
    for run in alternatives.values():
        for _ in range(_WARM_UP):
            run()
    clock.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    end = time.perf_counter() + budget_s
    for turn in range(max_runs):
        if turn >= min_runs and time.perf_counter() >= end:
            break
        taken = []
        for name, run in alternatives.items():
            if cold:
                clock.flush()
            clock.spin()
            start = clock.mark()
            run()
            taken.append(_Sample(name, start, clock.mark()))
        clock.synchronize()
        for sample in taken:
            samples[sample.name].append(clock.microseconds(sample.start, sample.stop))
    return {name: Timing.of(values) for name, values in samples.items()}


def cuda_ceilings() -> Ceilings:
    """Measure this GPU: a large copy (bytes read plus written), matrix products on random data, a pinned upload."""
    clock = CudaClock()

    def best(run: Callable[[], object]) -> float:
        return interleave_cuda({"": run}, budget_s=0.5, min_runs=10, max_runs=40, cold=False, clock=clock)[""].median_us

    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy_us = best(lambda: target.copy_(source))
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16_us = best(lambda: a @ b)
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    upload_us = best(lambda: target.view(torch.uint8)[: host.numel()].copy_(host, non_blocking=True))
    return Ceilings(
        copy_gbps=_short(2 * source.numel() * 4 / copy_us / 1e3),
        bf16_tflops=_short(2 * size**3 / bf16_us / 1e6),
        fp8_tflops=_fp8(a, b, size, best),
        h2d_gbps=_short(host.numel() / upload_us / 1e3),
    )


def _fp8(a: torch.Tensor, b: torch.Tensor, size: int, best: Callable[[Callable[[], object]], float]) -> float | None:
    """FP8 product with one scale a tensor; None where this PyTorch or GPU has none."""
    one = torch.ones((), device="cuda")
    x, y = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    try:
        us = best(lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    except (RuntimeError, NotImplementedError):
        return None
    return _short(2 * size**3 / us / 1e6)


def cuda_versions() -> dict[str, object]:
    """What ran: libraries, GPU, driver side and clocks as PyTorch sees them."""
    import platform
    from importlib import metadata

    import kernel_core

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    properties = torch.cuda.get_device_properties("cuda")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "kernel_core": kernel_core.__version__,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def device_ledger(name: str) -> str:
    """File stem of a GPU's ledger: the model's name without its maker, as in "h200" for "NVIDIA H200"."""
    words = [word for word in name.lower().split() if word not in ("nvidia", "amd", "geforce", "tesla")]
    return "_".join("".join(c for c in word if c.isalnum() or c == "-") for word in words) or "gpu"


def _short(value: float) -> float:
    return float(f"{value:.4g}")
