"""Sampling from the released vocabulary (129,280) and a small one: plain, filtered, greedy."""

from __future__ import annotations

import functools

import torch

import dspark_kernels
from dspark_kernels import reference
from kernel_core.bench import Bench, Case, Problem

SETTINGS = {  # temperature, top_p, top_k
    "greedy": (0.0, 1.0, 0),
    "plain": (1.0, 1.0, 0),
    "warm": (0.7, 1.0, 0),
    "top_p": (1.0, 0.95, 0),
    "top_k": (1.0, 1.0, 50),
    "both": (0.7, 0.95, 50),
}
SPREAD = 3.0  # of the logits: about a thousand tokens hold 95 % of the mass


def _rows(T: int, V: int) -> torch.Tensor:
    return torch.randn(T, V, generator=torch.Generator().manual_seed(T)) * SPREAD


def _sample(T: int, V: int, setting: str) -> Problem:
    temperature, top_p, top_k = SETTINGS[setting]
    logits = _rows(T, V)
    arguments = (
        torch.full((T,), temperature), torch.full((T,), top_p),
        torch.full((T,), top_k, dtype=torch.int32) if top_k else None, torch.arange(T), torch.arange(T),
    )  # fmt: skip

    def check() -> None:
        tokens, _ = dspark_kernels.sample(logits, *arguments)
        expected, _ = reference.sample(logits, *arguments)
        assert int((tokens != expected).sum()) <= 1, "more than a rounding of u apart"

    return Problem(
        native=lambda: dspark_kernels.sample(logits, *arguments),
        reference=lambda: reference.sample(logits, *arguments),
        bytes=4 * logits.numel(),
        flops=0,
        check=check,
    )


def _top(T: int, V: int, k: int) -> Problem:
    logits = _rows(T, V)
    return Problem(
        native=lambda: dspark_kernels.top_logprobs(logits, k),
        reference=lambda: reference.top_logprobs(logits, k),
        bytes=4 * logits.numel(),
        flops=0,
    )


def _mask(T: int, V: int) -> Problem:
    logits = _rows(T, V)
    bits = torch.randint(-(2**31), 2**31, (T, -(-V // 32))).to(torch.int32)
    return Problem(
        native=lambda: dspark_kernels.apply_token_mask(logits, bits),
        reference=lambda: reference.apply_token_mask(logits, bits),
        bytes=4 * logits.numel() + 4 * bits.numel(),
        flops=0,
    )


def _uniform(T: int) -> Problem:
    seeds, positions = torch.arange(T), torch.arange(T) * 7
    return Problem(
        native=lambda: dspark_kernels.uniform(seeds, positions),
        reference=lambda: reference.uniform(seeds, positions),
        bytes=24 * T,
        flops=0,
    )


BENCHES = [
    Bench(
        "dspark_kernels.sample",
        [
            Case(
                f"sample_{setting}_v{V}_t{T}",
                {"rows": T, "vocab": V, "temperature": t, "top_p": p, "top_k": k},
                functools.partial(_sample, T, V, setting),
            )
            for V, counts in ((4096, (1, 32)), (129_280, (1, 32)))
            for T in counts
            for setting, (t, p, k) in SETTINGS.items()
        ],
    ),
    Bench(
        "dspark_kernels.top_logprobs",
        [
            Case(f"top20_v129280_t{T}", {"rows": T, "vocab": 129_280}, functools.partial(_top, T, 129_280, 20))
            for T in (1, 32)
        ],
    ),
    Bench(
        "dspark_kernels.apply_token_mask",
        [Case("mask_v129280_t32", {"rows": 32, "vocab": 129_280}, functools.partial(_mask, 32, 129_280))],
    ),
    Bench("dspark_kernels.uniform", [Case("uniform_t1024", {"rows": 1024}, functools.partial(_uniform, 1024))]),
]
