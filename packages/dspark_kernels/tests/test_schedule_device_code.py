"""The scheduler's own device code, run by host threads: what threads exchange, index and store, not their races."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from dspark_kernels import Schedule, new_schedule, reference_schedule
from kernel_core.testing import assert_bitwise
from kernel_core.testing.child import load_file
from kernel_core.testing.host import host_library

HERE = Path(__file__).parent
THREADS = HERE.parents[1] / "mla_fp4" / "tests" / "host"
MAKE = load_file(HERE / "test_schedule.py").make


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    if not (THREADS / "threads.hpp").is_file():
        pytest.skip("needs the checkout: a block on host threads stands in mla_fp4's tests")
    folder = tmp_path_factory.mktemp("schedule")
    return host_library(HERE / "host/schedule_threads.cpp", folder, HERE.parent / "csrc", THREADS)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def run(lib, confidence, tokens, starts, limits, budget, capacity, slots, fixed, threads) -> Schedule:
    R, G = len(limits), confidence.shape[1]
    out = new_schedule(R, G, capacity)
    for tensor in out:
        tensor.fill_(-99)
    number, on_device = (0, budget) if isinstance(budget, torch.Tensor) else (budget, None)
    given = [confidence, tokens, starts, limits, slots, fixed, on_device]
    sources = (ctypes.c_void_p * 7)(*[None if t is None else t.data_ptr() for t in given])
    targets = (ctypes.c_void_p * 11)(*[t.data_ptr() for t in out])
    sizes = [ctypes.c_int64(n) for n in (R, G, capacity)]
    lib.schedule_host(*sizes, sources, ctypes.c_int64(number), targets, threads)
    return out


@pytest.mark.parametrize(
    ("R", "G", "levels", "threads"),
    [(1, 1, 0, 32), (3, 5, 3, 64), (32, 8, 1, 32), (70, 5, 2, 96), (90, 7, 0, 128), (64, 8, 4, 64)],
)
def test_equals_the_reference(lib, R, G, levels, threads):
    for seed in range(2):
        confidence, tokens, starts, limits, slots, fixed = MAKE(R, R + 3, G, seed, levels)
        lists = i32(limits), i32(slots), i32(fixed)
        needed = int(reference_schedule.needed_rows(lists[0], lists[1], lists[2], G))
        budgets = (0, 1, R // 2 + 1, 2 * R + 1, i32([R]), i32([-3]), 10**12)
        for number, budget in enumerate(budgets):
            capacity = max(1, needed + number * R // 2 - (1 if number == 3 else 0))
            arguments = (confidence, tokens, starts, lists[0], budget, capacity, lists[1], lists[2])
            got = run(lib, *arguments, threads)
            for name, a, b in zip(Schedule._fields, got, reference_schedule.schedule(*arguments), strict=True):
                assert_bitwise(a, b, name=f"{name}, budget {budget}")


def test_without_slots_and_fixed_lengths(lib):
    confidence = torch.ones(40, 3)
    confidence[5] = 0.0
    tokens, starts = torch.arange(160).view(40, 4), torch.arange(40)
    for budget in (1, 39, 40, 41, 79, 116, 117, 118, 120):
        arguments = (confidence, tokens, starts, i32([3] * 40), budget, 200, None, None)
        got = run(lib, *arguments, 64)
        for name, a, b in zip(Schedule._fields, got, reference_schedule.schedule(*arguments), strict=True):
            assert_bitwise(a, b, name=name)


@pytest.mark.parametrize(
    "around",
    [(0.7, 1e-7), (0.7, 1e-4), (0.7001, 2e-4), (0.5, 3e-3), (1e-20, 1e-20), (1e-3, 1e-3), (1.0, -1e-7), (0.6, 0.0)],
)
def test_survivals_that_are_close_together(lib, around):
    """All of them fall into one even step or a few, so that finer ones are needed."""
    center, width = around
    R, G = 64, 8
    confidence = torch.ones(R, G)
    confidence[:, 0] = center + width * torch.rand(R, generator=torch.Generator().manual_seed(7))
    confidence[:, 5] = 0.99999
    tokens, starts = torch.arange(R * (G + 1)).view(R, G + 1), torch.arange(R)
    for budget in (1, 33, 200, 320, 333, 511):
        arguments = (confidence, tokens, starts, i32([G] * R), budget, R * (G + 1) - 3, None, None)
        got = run(lib, *arguments, 64)
        for name, a, b in zip(Schedule._fields, got, reference_schedule.schedule(*arguments), strict=True):
            assert_bitwise(a, b, name=f"{name}, budget {budget}")
