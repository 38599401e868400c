"""A speculative step on the CPU: confidences, schedule, draft steps, verification; 4,096 and 129,280 tokens."""

from __future__ import annotations

import functools

import torch
from spec_inputs import rows, schedule_inputs, verify_bytes, verify_inputs

import dspark_kernels
from dspark_kernels import new_proposals, reference_schedule, reference_verify
from kernel_core import using
from kernel_core.bench import Bench, Case, Problem

DRAFTS = 5


def _confidence(B: int) -> Problem:
    hidden, markov, weight = torch.randn(B, DRAFTS, 5120), torch.randn(B, DRAFTS, 256), torch.randn(5376) / 70
    return Problem(
        native=lambda: dspark_kernels.confidence_head(hidden, markov, weight),
        reference=lambda: reference_schedule.confidence_head(hidden, markov, weight, None),
        bytes=hidden.nbytes + markov.nbytes + weight.nbytes,
        flops=2 * B * DRAFTS * 5376,
    )


def _survival(B: int) -> Problem:
    confidence = torch.rand(B, DRAFTS)
    return Problem(
        native=lambda: dspark_kernels.survival(confidence),
        reference=lambda: confidence.cumprod(1),
        bytes=2 * confidence.nbytes,
        flops=B * DRAFTS,
    )


def _schedule(R: int, G: int) -> Problem:
    inputs = schedule_inputs(R, G)

    def reference() -> object:
        with using("reference"):
            return dspark_kernels.schedule(**inputs)

    def check() -> None:
        for a, b in zip(dspark_kernels.schedule(**inputs), reference(), strict=True):
            assert torch.equal(a, b), "not the stable sort's order"

    read = sum(inputs[name].nbytes for name in ("confidence", "tokens", "starts", "limits", "slots"))
    written = R * (G * 8 + 20) + inputs["capacity"] * 28
    return Problem(
        native=lambda: dspark_kernels.schedule(**inputs),
        reference=reference,
        bytes=read + written,
        flops=R * G,
        check=check,
    )


def _draft(B: int, V: int, setting: str) -> Problem:
    logits, bias, at = torch.randn(B, 1, V) * 3, torch.zeros(B, V), torch.arange(B)
    s, out = rows(B, V, setting), new_proposals(B, 1)
    return Problem(
        native=lambda: dspark_kernels.draft_step(logits, 0, bias, *s, at, out),
        reference=lambda: reference_verify.draft_step(logits, 0, bias, *s, at, out, None),
        bytes=3 * logits.nbytes,
        flops=0,
    )


def _verify(R: int, V: int, setting: str) -> Problem:
    inputs = verify_inputs(R, DRAFTS, V, setting, 0.5)

    def check() -> None:
        ours = dspark_kernels.verify(**inputs)
        theirs = reference_verify.verify(*inputs.values(), None, None)
        assert int((ours.tokens != theirs.tokens).any(1).sum()) <= 1, "more than a rounding of u apart"

    return Problem(
        native=lambda: dspark_kernels.verify(**inputs),
        reference=lambda: reference_verify.verify(*inputs.values(), None, None),
        bytes=verify_bytes(inputs, dspark_kernels.verify(**inputs).accepted),
        flops=0,
        check=check,
    )


_SOURCES = ("csrc/*", "csrc/cpu/**/*", "src/dspark_kernels/*.py", "CMakeLists.txt")
BENCHES = [
    Bench(
        "dspark_kernels.confidence_head",
        [Case(f"confidence_b{B}", {"requests": B}, functools.partial(_confidence, B)) for B in (1, 64)],
        _SOURCES,
    ),
    Bench(
        "dspark_kernels.survival",
        [Case("survival_b1024", {"requests": 1024}, functools.partial(_survival, 1024))],
        _SOURCES,
    ),
    Bench(
        "dspark_kernels.schedule",
        [
            Case(f"schedule_r{R}_g{G}", {"requests": R, "drafts": G}, functools.partial(_schedule, R, G))
            for R, G in ((16, 5), (64, 5), (1024, 5), (1024, 8))
        ],
        _SOURCES,
    ),
    Bench(
        "dspark_kernels.draft_step",
        [
            Case(f"draft_{setting}_v{V}_t{B}", {"requests": B, "vocab": V}, functools.partial(_draft, B, V, setting))
            for V, B in ((4096, 16), (129_280, 16))
            for setting in ("greedy", "plain")
        ],
        _SOURCES,
    ),
    Bench(
        "dspark_kernels.verify",
        [
            Case(
                f"verify_{setting}_v{V}_r{R}",
                {"requests": R, "drafts": DRAFTS, "vocab": V},
                functools.partial(_verify, R, V, setting),
            )
            for V, R in ((4096, 16), (129_280, 4))
            for setting in ("greedy", "plain", "top_p")
        ],
        _SOURCES,
    ),
]
