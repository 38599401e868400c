"""Fused experts on an NVIDIA GPU at the released widths: every expert active with as many rows, and a prefill step.

Weights are packed bytes at random. Beside the one launch: the same work as four launches, E4M3 activations, what this
package runs without its kernels (few experts alone), and Humming where it can be imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from humming_peer import INPUTS, humming

from kernel_core import formats
from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import assert_near

D, INTER, LIMIT = 5120, 2304, 10.0
STEP, CODES = 8704, 8192  # bytes of a step, and of its codes
NEAR, NEAR_FP8 = 4e-3, 6e-2
CHECKED = 3  # experts whose rows are compared with the reference
LIBRARY = 7  # experts up to which the library's path ends in reasonable time


def _steps(experts: int, rows: int, columns: int, low: int, high: int, factor: int) -> torch.Tensor:
    """Packed weights: any codes, scale bytes `factor` times low to high - 1."""
    steps = torch.randint(0, 256, (experts, rows // 128, columns // 128, STEP), dtype=torch.uint8, device="cuda")
    shape = (*steps.shape[:-1], STEP - CODES)
    steps[..., CODES:] = factor * torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")
    return steps.flatten(1)


def exact_weights(experts: int):
    from mega_moe.cuda import layout

    w13, w2 = (_steps(experts, r, c, 239, 244, 1) for r, c in ((2 * INTER, D), (D, INTER)))
    return layout.PackedExperts(w13, w2, D, INTER, layout.new_state(w13.device))


def fp8_weights(experts: int):
    from mega_moe.cuda import layout, layout_fp8

    w13, w2 = (_steps(experts, r, c, 0, 5, 8) for r, c in ((2 * INTER, D), (D, INTER)))
    factors = (torch.full((experts, rows), 2.0**-9, device="cuda") for rows in (2 * INTER, D))
    return layout_fp8.PackedExpertsFp8(w13, w2, *factors, D, INTER, layout.new_state(w13.device))


def even(experts: int, each: int) -> torch.Tensor:
    """One slot a token; every expert has `each` rows."""
    return torch.arange(experts, device="cuda").repeat(each).view(-1, 1).int()


def drawn(experts: int, tokens: int, slots: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(slots, -1).indices.int()


def _reference(x: torch.Tensor, ids: torch.Tensor, gains: torch.Tensor, packed, expert: int, row: int) -> torch.Tensor:
    """A token's rows of one expert, with the kernel's roundings, in float32."""
    from mega_moe.cuda import layout

    w13 = formats.dequantize_mxfp4(*layout.unpack_mxfp4(packed.w13[expert], 2 * INTER, D, interleaved=True))
    w2 = formats.dequantize_mxfp4(*layout.unpack_mxfp4(packed.w2[expert], D, INTER, interleaved=False))
    gate, up = (w13.double() @ x[row].double()).float().chunk(2)
    hidden = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * gains[row, 0]
    return (w2.double() @ hidden.bfloat16().double()).float()


def _check(x: torch.Tensor, ids: torch.Tensor, gains: torch.Tensor, packed, out: torch.Tensor) -> None:
    """Rows of one slot alone."""
    for row in range(0, len(ids), max(1, len(ids) // CHECKED)):
        expected = _reference(x, ids, gains, packed, int(ids[row, 0]), row)
        assert_near(f"experts, row {row}", out[row], expected, NEAR)


def _problem(experts: int, make: Callable[[], torch.Tensor], each: int | None) -> Problem:
    from mega_moe.cuda import experts as kernels
    from mega_moe.cuda.route import permute

    packed, ids = exact_weights(experts), make()
    x = torch.randn(len(ids), D, device="cuda").bfloat16()
    gains = torch.rand(ids.shape, device="cuda")
    offsets, rows = permute(ids, experts, shared=False)
    active = int((offsets[1:] > offsets[:-1]).sum())
    flops, moved = 6 * D * INTER * ids.numel(), active * 3 * D * INTER * 17 // 32 + 2 * x.numel() * 2

    def launch(weights, **options: object) -> Callable[[], torch.Tensor]:
        out = torch.empty_like(x)
        return lambda: kernels.experts(x, ids, gains, weights, offsets, rows, limit=LIMIT, out=out, **options)

    run = launch(packed)

    def fp8() -> Callable[[], object]:
        return launch(fp8_weights(experts))

    peers = [Offer("four launches", lambda: launch(packed, chain=True), "this package")]
    if each is None or each >= 32:
        peers.append(Offer("W4A8", fp8, "this package"))
    if experts <= LIBRARY and each is not None and each <= 64:
        peers.append(Offer("PyTorch's operators", functools.partial(_library, x, ids, gains, packed), "torch"))
    if each is not None:
        peers += [humming(kind, experts, each, D, INTER) for kind in INPUTS]
    return Problem(
        run,
        None,
        moved,
        flops,
        peers=peers,
        check=(lambda: _check(x, ids, gains, packed, run())) if ids.shape[1] == 1 else None,
        compute="bf16",
        cold=True,
        note=f"W4A16, rows sorted before; {active} experts active",
    )


def _library(x: torch.Tensor, ids: torch.Tensor, gains: torch.Tensor, packed) -> Callable[[], object]:
    from mega_moe import library
    from mega_moe.cuda import layout

    stored, wide = layout.unpack_experts(packed)[:4], x.float()
    return lambda: library.fused_experts(wide, ids, gains, *stored, limit=LIMIT, shared=None)


def _case(experts: int, each: int) -> Case:
    shape = {"experts": experts, "rows": each, "dim": D, "inter": INTER}
    return Case(
        f"moe_e{experts}_t{each}", shape, functools.partial(_problem, experts, lambda: even(experts, each), each)
    )


def _prefill(experts: int, tokens: int, slots: int) -> Case:
    shape = {"experts": experts, "tokens": tokens, "top_k": slots, "dim": D, "inter": INTER}
    make = functools.partial(_problem, experts, lambda: drawn(experts, tokens, slots), None)
    return Case(f"moe_prefill_e{experts}_q{tokens}", shape, make)


BENCHES = [
    Bench(
        "mega_moe.fused_experts",
        [_case(e, t) for e in (7, 48) for t in (1, 8, 16, 64, 128, 256)] + [_prefill(48, 8192, 6)],
        ("csrc/cuda/**/*", "src/mega_moe/cuda/*.py"),
        device="cuda",
    )
]
