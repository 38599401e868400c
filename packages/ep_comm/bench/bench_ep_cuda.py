"""Dispatch and combine on one NVIDIA GPU: a rank alone against a copy of as many bytes, and virtual ranks.

Prefill's packed dispatch waits for the host in the middle, as it does in use; a decode round trip is one fixed dispatch
and one combine. Virtual ranks share the GPU's memory: their figures say what the kernels and flags cost, not a link.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ep_comm import Shape, reference
from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import cuda_module

HIDDEN, TOP_K, EXPERTS, CHECKED = 4096, 6, 384, 4
SOURCES = ("csrc/cuda/**/*", "csrc/include/ep_comm/layout.hpp", "src/ep_comm/cuda/*.py")


class _Ranks:
    """A group with what its ranks dispatch, and random results of the right sizes."""

    def __init__(self, shape: Shape, fixed: bool) -> None:
        self.shape, self.fixed = shape, fixed
        if cuda_module("ep_comm._cuda", "launch") is None:
            raise NotImplementedError("ep_comm._cuda is not built, and there is no other implementation")
        from ep_comm.cuda import Together, virtual

        s, g = self.shape, torch.Generator("cuda").manual_seed(1)
        self.group: Any = Together(virtual(s, fixed=self.fixed, packed=not self.fixed))
        sizes = [(s.max_tokens, s.physical_experts)] * s.ranks
        self.ids = [torch.rand(*n, device="cuda", generator=g).topk(s.top_k).indices.int() for n in sizes]
        self.weights = [torch.rand(s.max_tokens, s.top_k, device="cuda", generator=g) for _ in sizes]
        self.x = [torch.randn(s.max_tokens, s.hidden, device="cuda", generator=g).bfloat16() for _ in sizes]
        received = self.dispatch()
        self.rows = sum(int(d.counts.sum()) for d in received)
        self.slots = sum(int((d.ids >= 0).sum()) for d in received)
        self.y = [
            torch.randn(len(d.ids), s.top_k, s.hidden, device="cuda", generator=g, dtype=torch.bfloat16)
            for d in received
        ]
        self.group.combine(self.y, received)

    def dispatch(self) -> Any:
        return self.group.dispatch(self.x, self.ids, self.weights, fixed=self.fixed)

    def round_trip(self) -> Any:
        return self.group.combine(self.y, self.dispatch())

    @property
    def dispatch_bytes(self) -> int:
        tokens = self.shape.ranks * self.shape.max_tokens
        return tokens * HIDDEN * 2 + self.rows * self.shape.token_bytes

    @property
    def combine_bytes(self) -> int:
        return self.slots * HIDDEN * 2 + self.shape.ranks * self.shape.max_tokens * HIDDEN * 4

    def check(self) -> None:
        """Counts, sources, ids and the first rows of every rank, and all sums, against the reference."""
        received = self.dispatch()
        given = [[t.cpu() for t in ts] for ts in (self.x, self.ids, self.weights)]
        expected = reference.dispatch(self.shape, *given, fixed=self.fixed)
        for d, e in zip(received, expected, strict=True):
            same = all(
                torch.equal(a.cpu(), b) for a, b in ((d.counts, e.counts), (d.sources, e.sources), (d.ids, e.ids))
            )
            first = slice(0, min(CHECKED, int(e.counts[0])))
            if not same or not torch.equal(d.x[first].cpu().view(torch.uint8), e.x[first].view(torch.uint8)):
                raise ArithmeticError("ep_comm: a dispatch differs from the reference")
        outs = self.group.combine(self.y, received)
        self.group.check()
        sums = reference.combine(self.shape, [y.cpu() for y in self.y], expected, given[1])
        if not all(torch.equal(a.cpu(), b) for a, b in zip(outs, sums, strict=True)):
            raise ArithmeticError("ep_comm: a combine differs from the reference")


def _shape(ranks: int, tokens: int, form: str) -> Shape:
    return Shape(ranks, tokens, HIDDEN, TOP_K, EXPERTS // ranks, form, "bfloat16")  # type: ignore[arg-type]


def _copy(size: int) -> Offer:
    """Of `size` bytes read and written together."""

    def make() -> Any:
        a = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
        b = torch.empty_like(a)
        return lambda: b.copy_(a)

    return Offer("copy of as many bytes", make, "torch")


def _dispatch(ranks: int, tokens: int, form: str) -> Problem:
    r = _Ranks(_shape(ranks, tokens, form), fixed=False)
    size = r.dispatch_bytes
    return Problem(r.dispatch, None, size, 0, peers=[_copy(size)], check=r.check, note=f"cuda; packed, {r.rows} rows")


def _combine(ranks: int, tokens: int, form: str) -> Problem:
    r = _Ranks(_shape(ranks, tokens, form), fixed=False)
    received, size = r.dispatch(), r.combine_bytes
    return Problem(lambda: r.group.combine(r.y, received), None, size, 0, peers=[_copy(size)], check=None,
                   note=f"cuda; one after the other, so ranks meet twice; {r.slots} slots")  # fmt: skip


def _round_trip(ranks: int, tokens: int, form: str, empty: bool = False) -> Problem:
    r = _Ranks(_shape(ranks, tokens, form), fixed=True)
    if empty:
        r.x, r.ids, r.weights = ([t[:0] for t in ts] for ts in (r.x, r.ids, r.weights))
    size = 2 * 8 * ranks**2 if empty else r.dispatch_bytes + r.combine_bytes  # nothing but flags
    return Problem(r.round_trip, None, size, 0, peers=[] if empty else [_copy(size)],
                   check=None if empty else r.check, note="cuda; virtual ranks, two launches")  # fmt: skip


def _cases(name: str, make: Any, *sizes: tuple[int, int, str]) -> list[Case]:
    return [
        Case(f"ep_{name}_{form}_ep{ranks}_t{tokens}", {"ranks": ranks, "tokens": tokens, "format": form},
             functools.partial(make, ranks, tokens, form))
        for ranks, tokens, form in sizes
    ]  # fmt: skip


PREFILL = ((1, 4096, "fp8"), (1, 4096, "bfloat16"), (8, 1024, "fp8"))
DECODE = ((1, 128, "fp8"), (8, 8, "fp8"), (8, 128, "fp8"), (8, 128, "bfloat16"))
EMPTY = Case("ep_roundtrip_empty_ep8", {"ranks": 8, "tokens": 0}, lambda: _round_trip(8, 4, "fp8", empty=True))
BENCHES = [
    Bench("ep_comm.dispatch", _cases("dispatch", _dispatch, *PREFILL), SOURCES, device="cuda"),
    Bench("ep_comm.combine", _cases("combine", _combine, *PREFILL), SOURCES, device="cuda"),
    Bench("ep_comm.roundtrip", [*_cases("roundtrip", _round_trip, *DECODE), EMPTY], SOURCES, device="cuda"),
]
