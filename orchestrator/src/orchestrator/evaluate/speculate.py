"""Speculative decoding with the model's own functions: a batch of requests in lockstep, every step noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import dspark_kernels
from orchestrator.evaluate.feed import Bounds, Feeder, Piece
from orchestrator.evaluate.verify import verify
from orchestrator.model.drafter import Drafter, log_distribution
from orchestrator.model.transformer import Transformer
from swa_replay import plan_decoder_tail


@dataclass(frozen=True)
class Trial:
    """One verification of one request.

    `kept` drafts of `offered` stood; fewer are offered than drafted where an end token stands among them. `ended`
    tells that such an end token was kept, so that the step gave no token of the target's own.
    `confidence_logits` and `confidence` have an entry a draft.
    """

    request: int
    kept: int
    offered: int
    ended: bool
    confidence_logits: tuple[float, ...]
    confidence: tuple[float, ...]


@dataclass
class Decoded:
    """Outputs by request, without their prompts, and all verifications in order."""

    outputs: list[list[int]]
    trials: list[Trial] = field(default_factory=list)


@dataclass
class _Running:
    request: int
    tokens: list[int]
    prompt: int
    limit: int


def speculate(
    model: Transformer,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    eos: Sequence[int] = (),
    tick: Callable[[int], None] = lambda _: None,
) -> Decoded:
    """Continue every prompt by `max_tokens` tokens or to an end token, which is part of the output.

    Prompts are prefilled with the decoder on their tail, as the engine does. Each step verifies the newest token and
    its drafts at once. At temperature 0 the outputs are those of plain greedy decoding.

    Raises:
        ValueError: no prompts, an empty one, or no token to make.
    """
    if not prompts or not all(prompts):
        raise ValueError("prompts: got none or an empty one, allowed is at least one with at least one token")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, allowed is at least 1")
    slack = model.config.backtracking
    feeder = Feeder(model, len(prompts), max(map(len, prompts)) + max_tokens + slack, drafter=drafter)
    result = Decoded([[] for _ in prompts])
    running = [_prefill(feeder, i, prompt, max_tokens, temperature, seed) for i, prompt in enumerate(prompts)]
    tick(sum(map(len, prompts)))
    while True:
        for one in running:
            result.outputs[one.request] = one.tokens[one.prompt :]
        running = [r for r in running if len(r.tokens) < r.limit and r.tokens[-1] not in eos]
        if not running:
            return result
        _step(feeder, drafter, running, temperature, seed, eos, result)
        tick(len(running) * slack)


def _prefill(
    feeder: Feeder, request: int, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int
) -> _Running:
    config = feeder.model.config
    lower = plan_decoder_tail(len(prompt), config.sliding_window, config.draft_length).start
    logits = feeder.run(Piece(request, prompt, 0, len(prompt), "last", Bounds(decoder_lower=lower)))
    at = torch.tensor([len(prompt)])
    first = dspark_kernels.sample(logits, torch.tensor([temperature]), torch.ones(1), None, _seeds([request], seed), at)
    return _Running(request, [*prompt, int(first[0])], len(prompt), len(prompt) + max_tokens)


@torch.inference_mode()
def _step(
    feeder: Feeder,
    drafter: Drafter,
    running: list[_Running],
    temperature: float,
    seed: int,
    eos: Sequence[int],
    result: Decoded,
) -> None:
    """Draft, verify, commit."""
    anchors = torch.tensor([r.tokens[-1] for r in running])
    positions = torch.tensor([len(r.tokens) - 1 for r in running])
    slots = torch.tensor([feeder.slot(r.request) for r in running], dtype=torch.int32)
    seeds, hot = _seeds([r.request for r in running], seed), torch.full((len(running),), temperature)
    drafts = drafter.draft(anchors, positions, slots, feeder.cache, hot, seeds)
    proposed, length = drafts.tokens.tolist(), drafts.tokens.shape[1]
    pieces = [
        Piece(r.request, r.tokens + new, len(r.tokens) - 1, len(r.tokens) + length)
        for r, new in zip(running, proposed, strict=True)
    ]
    logits = feeder.step(pieces)
    log_p = log_distribution(logits, hot.repeat_interleave(length + 1)).view(len(running), length + 1, -1)
    kept, following = verify(log_p, drafts.log_q, drafts.tokens, seeds, positions + 1)
    for i, (one, new, count, after) in enumerate(
        zip(running, proposed, kept.tolist(), following.tolist(), strict=True)
    ):
        ends = [k + 1 for k, token in enumerate(new) if token in eos]
        offered = min([length, *ends])
        committed = [*new[:count], after][: offered + 1]
        ended = bool(ends) and count >= offered
        if ended:  # nothing counts after an end token that was kept
            committed = committed[:offered]
        trial = Trial(
            request=one.request,
            kept=min(count, offered),
            offered=offered,
            ended=ended,
            confidence_logits=tuple(drafts.confidence_logits[i].tolist()),
            confidence=tuple(drafts.confidence[i].tolist()),
        )
        result.trials.append(trial)
        one.tokens = (one.tokens + committed)[: one.limit]


def _seeds(requests: Sequence[int], seed: int) -> torch.Tensor:
    """One seed a request, so that equal prompts get different draws."""
    return torch.tensor([seed * 1_000_003 + r for r in requests], dtype=torch.int64)
