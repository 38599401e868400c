"""A speculative step on an NVIDIA GPU: the schedule of up to 1024 requests, and 768 rows of 129,280 logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from spec_inputs import rows, schedule_inputs, verify_bytes, verify_inputs

import dspark_kernels
from dspark_kernels import new_proposals, new_schedule, new_verified
from kernel_core import using
from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import cuda_module

VOCABULARY, DRAFTS = 129_280, 5
SOURCES = ("csrc/*.hpp", "csrc/cuda/**/*", "src/dspark_kernels/cuda/*.py")


def _built() -> None:
    if cuda_module("dspark_kernels._cuda", "verify") is None:
        raise NotImplementedError("dspark_kernels._cuda is not built")


def _library(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with using("library"):
            return call()

    return run


def _schedule(R: int, G: int) -> Problem:
    _built()
    inputs = schedule_inputs(R, G, "cuda")
    room = new_schedule(R, G, inputs["capacity"], "cuda")

    def run() -> object:
        return dspark_kernels.schedule(**inputs, out=room)

    def check() -> None:
        run()
        torch.cuda.synchronize()
        expected = dspark_kernels.schedule(**schedule_inputs(R, G))
        for name, a, b in zip(room._fields, room, expected, strict=True):
            if not torch.equal(a.cpu(), b):
                raise ArithmeticError(f"schedule: {name} is not the CPU's")

    moved = sum(t.nbytes for t in inputs.values() if isinstance(t, torch.Tensor)) + sum(t.nbytes for t in room)
    peers = [Offer("torch operators", lambda: _library(run), "torch")]
    return Problem(run, None, moved, R * G, peers=peers, check=check, note="cuda")


def _near(ours: torch.Tensor, theirs: torch.Tensor, most: int, what: str) -> None:
    apart = int((ours != theirs).view(len(ours), -1).any(1).sum())
    if apart > most:
        raise ArithmeticError(f"{what}: {apart} of {len(ours)} rows differ, more than a rounding of u explains")


def _verify(R: int, setting: str, noise: float) -> Problem:
    _built()
    inputs = verify_inputs(R, DRAFTS, VOCABULARY, setting, noise, "cuda")
    given = inputs | {"top_p": None} if setting == "plain" else inputs  # as the engine does
    room = new_verified(R, DRAFTS, "cuda")

    def run() -> dspark_kernels.Verified:
        return dspark_kernels.verify(**given, out=room)

    def check() -> None:
        part = 8  # requests that the CPU does too
        width = part * (1 + DRAFTS)
        few: dict[str, Any] = {
            name: None if value is None else value[:part].cpu() for name, value in inputs.items() if name != "proposals"
        }
        few["proposals"] = dspark_kernels.Proposals(*(t[:part].cpu() for t in inputs["proposals"]))
        few |= {"logits": inputs["logits"][:width].cpu(), "positions": inputs["positions"][:width].cpu()}
        few["cu_rows"] = inputs["cu_rows"][: part + 1].cpu()
        _near(run().tokens[:part].cpu(), dspark_kernels.verify(**few).tokens, 1, "verify")

    moved = verify_bytes(inputs, run().accepted)
    peers = [Offer("torch operators", lambda: _library(lambda: dspark_kernels.verify(**inputs)), "torch")]
    return Problem(run, None, moved, 0, peers=peers if R <= 128 else [], check=check, cold=True, note="cuda")


def _draft(B: int, setting: str) -> Problem:
    _built()
    g = torch.Generator("cuda").manual_seed(B)
    logits, bias = torch.randn(B, 1, VOCABULARY, generator=g, device="cuda") * 3, torch.zeros(B, VOCABULARY).cuda()
    s, at, out = rows(B, VOCABULARY, setting, "cuda"), torch.arange(B, device="cuda"), new_proposals(B, 1, "cuda")

    def run() -> torch.Tensor:
        return dspark_kernels.draft_step(logits, 0, bias, *s, at, out)

    def check() -> None:
        host = [None if t is None else t.cpu() for t in s]
        expected = dspark_kernels.draft_step(logits.cpu(), 0, None, *host, at.cpu(), new_proposals(B, 1))
        _near(run().cpu(), expected, 1 + B // 50, "draft_step")

    peers = [Offer("torch operators", lambda: _library(run), "torch")]
    return Problem(run, None, 3 * logits.nbytes, 0, peers=peers, check=check, cold=True, note="cuda")


def _sample(T: int, setting: str) -> Problem:
    _built()
    g = torch.Generator("cuda").manual_seed(T)
    logits = torch.randn(T, VOCABULARY, generator=g, device="cuda") * 3
    s, at = rows(T, VOCABULARY, setting, "cuda"), torch.arange(T, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return dspark_kernels.sample(logits, *s, at)

    def check() -> None:
        host = [None if t is None else t.cpu() for t in s]
        _near(run()[0].cpu(), dspark_kernels.sample(logits.cpu(), *host, at.cpu())[0], 1 + T // 50, "sample")

    peers = [Offer("torch operators", lambda: _library(run), "torch")]
    return Problem(run, None, logits.nbytes, 0, peers=peers, check=check, cold=True, note="cuda")


def _confidence(B: int) -> Problem:
    _built()
    hidden, markov = torch.randn(B, DRAFTS, 5120, device="cuda"), torch.randn(B, DRAFTS, 256, device="cuda")
    weight = torch.randn(5376, device="cuda") / 70

    def run() -> object:
        return dspark_kernels.confidence_head(hidden, markov, weight)

    peers = [Offer("torch operators", lambda: _library(run), "torch")]
    moved = hidden.nbytes + markov.nbytes + weight.nbytes
    return Problem(run, None, moved, 2 * B * DRAFTS * 5376, peers=peers, cold=True, note="cuda")


BENCHES = [
    Bench(
        "dspark_kernels.confidence_head",
        [Case(f"dspark_confidence_{B}", {"requests": B}, functools.partial(_confidence, B)) for B in (1, 64)],
        SOURCES,
        device="cuda",
    ),
    Bench(
        "dspark_kernels.schedule",
        [
            Case(name, {"requests": R, "drafts": G}, functools.partial(_schedule, R, G))
            for name, R, G in (
                ("dspark_schedule_r64", 64, 5),
                ("dspark_schedule_r1024", 1024, 5),
                ("dspark_schedule_r1024_g8", 1024, 8),
            )
        ],
        SOURCES,
        device="cuda",
    ),
    Bench(
        "dspark_kernels.verify",
        [
            Case(
                name,
                {"rows": R * (1 + DRAFTS), "vocab": VOCABULARY, "setting": setting, "noise": noise},
                functools.partial(_verify, R, setting, noise),
            )
            for name, R, setting, noise in (
                ("dspark_verify_768", 128, "plain", 0.3),
                ("dspark_verify_768_greedy", 128, "greedy", 0.1),
                ("dspark_verify_768_rejected", 128, "plain", 3.0),
                ("dspark_verify_768_top_p", 128, "top_p", 0.3),
                ("dspark_verify_48", 8, "plain", 0.3),
            )
        ],
        SOURCES,
        device="cuda",
    ),
    Bench(
        "dspark_kernels.draft_step",
        [
            Case(f"dspark_draft_{B}", {"rows": B, "vocab": VOCABULARY}, functools.partial(_draft, B, "plain"))
            for B in (8, 128)
        ],
        SOURCES,
        device="cuda",
    ),
    Bench(
        "dspark_kernels.sample",
        [
            Case(
                f"dspark_sample_{setting}_{T}", {"rows": T, "vocab": VOCABULARY}, functools.partial(_sample, T, setting)
            )
            for T in (8, 128)
            for setting in ("greedy", "plain", "top_p", "top_k")
        ],
        SOURCES,
        device="cuda",
    ),
]
