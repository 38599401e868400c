"""The router and the order of rows by expert on an NVIDIA GPU: 384 experts, 6 of them for each token."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kernel_core import using
from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import cuda_module

EXPERTS, TOP_K = 384, 6
SOURCES = ("csrc/cuda/**/route*", "csrc/cuda/bindings_route.cpp", "src/mega_moe/cuda/route.py")


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    if cuda_module("mega_moe._cuda", "route") is None:
        raise NotImplementedError("route: mega_moe._cuda is not built, and there is no other implementation")
    g = torch.Generator("cuda").manual_seed(tokens)
    return torch.randn(tokens, EXPERTS, generator=g, device="cuda"), torch.randn(EXPERTS, generator=g, device="cuda")


def _route(tokens: int) -> Problem:
    import mega_moe
    from mega_moe.cuda import route

    logits, bias = _inputs(tokens)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return route.route(logits, bias, TOP_K, bias_vl=None, is_image=None, routed_scale=1.5)

    def library() -> tuple[torch.Tensor, torch.Tensor]:
        with using("library"):
            return mega_moe.route(logits, bias, TOP_K)

    def check() -> None:
        (ids, weights), (expected_ids, expected) = run(), library()
        same = (ids == expected_ids).all(1)
        if not float(same.float().mean()) > 0.999:
            raise ArithmeticError(f"route: {float(same.float().mean()):.2%} of the rows agree with the reference")
        torch.testing.assert_close(weights[same], expected[same], atol=1e-6, rtol=1e-5)

    moved = logits.nbytes + bias.nbytes + tokens * TOP_K * 8
    peers = [Offer("torch operators", lambda: library, "torch")]
    return Problem(run, None, moved, 40 * tokens * EXPERTS, peers=peers, check=check, cold=True, note="cuda")


def _sort(ids: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.sort(ids.flatten(), stable=True)


def _permute(tokens: int, fused: bool) -> Problem:
    from mega_moe.cuda import route

    logits, bias = _inputs(tokens)
    ids, _ = route.route(logits, bias, TOP_K, bias_vl=None, is_image=None, routed_scale=1.5)
    ticket = route.new_ticket(logits.device)

    def run() -> route.Permutation:
        if fused:
            return route.route_permute(logits, bias, TOP_K, ticket, shared=True)[2]
        return route.permute(ids, EXPERTS, shared=True)

    def check() -> None:
        made, flat = run(), ids.flatten().long()
        if not torch.equal(made.rows[: len(flat)].long(), torch.sort(flat, stable=True).indices):
            raise ArithmeticError("permute: rows differ from a stable sort")
        if not torch.equal(made.offsets[1 : EXPERTS + 1].long(), torch.bincount(flat, minlength=EXPERTS).cumsum(0)):
            raise ArithmeticError("permute: offsets differ from the sums of the counts")

    moved = ids.nbytes + tokens * (TOP_K + 1) * 4 + (logits.nbytes if fused else 0)
    peers = [Offer("torch.sort", functools.partial(_sort, ids), "torch")]
    return Problem(run, None, moved, 0, peers=peers, check=check, cold=True, note="cuda")


def _case(name: str, tokens: int, make: Callable[[], Problem]) -> Case:
    return Case(f"{name}_e{EXPERTS}_t{tokens}", {"tokens": tokens, "experts": EXPERTS, "top_k": TOP_K}, make)


BENCHES = [
    Bench(
        "mega_moe.route",
        [_case("route", t, functools.partial(_route, t)) for t in (1, 64, 1024, 8192)],
        SOURCES,
        device="cuda",
    ),
    Bench(
        "mega_moe.permute",
        [_case("permute", t, functools.partial(_permute, t, False)) for t in (1, 64, 1024, 8192)]
        + [_case("route_permute", t, functools.partial(_permute, t, True)) for t in (1, 64, 256)],
        SOURCES,
        device="cuda",
    ),
]
