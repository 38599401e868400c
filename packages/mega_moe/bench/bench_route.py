"""The router at the sizes of the small and the released model."""

from __future__ import annotations

import functools

import torch

import mega_moe
from kernel_core import using
from kernel_core.bench import Bench, Case, Problem


def _problem(tokens: int, experts: int, top_k: int) -> Problem:
    g = torch.Generator().manual_seed(tokens)
    logits, bias = torch.randn(tokens, experts, generator=g), torch.randn(experts, generator=g) * 0.1

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        with using("reference"):
            return mega_moe.route(logits, bias, top_k)

    def check() -> None:
        torch.testing.assert_close(mega_moe.route(logits, bias, top_k)[1], reference()[1], atol=1e-6, rtol=1e-5)

    return Problem(
        native=lambda: mega_moe.route(logits, bias, top_k),
        reference=reference,
        bytes=logits.nbytes + bias.nbytes + tokens * top_k * 8,
        flops=40 * tokens * experts,
        check=check,
    )


def _case(point: str, tokens: int, experts: int, top_k: int) -> Case:
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k}
    return Case(point, shape, functools.partial(_problem, tokens, experts, top_k))


BENCHES = [
    Bench(
        "mega_moe.route",
        [
            _case("route_e12_t1", 1, 12, 2),
            _case("route_e384_t1", 1, 384, 6),
            _case("route_e384_t512", 512, 384, 6),
        ],
    )
]
