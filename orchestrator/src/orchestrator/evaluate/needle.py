"""Retrieval: a value stands once in a long text, and the text ends where it has to be written again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from orchestrator.evaluate.feed import Bounds, Feeder, Piece
from orchestrator.evaluate.statistics import Estimate
from orchestrator.model.transformer import Transformer
from orchestrator.text.tokenizer import Tokenizer
from swa_replay import plan_decoder_tail

MakePrompt = Callable[[random.Random, int, float], tuple[str, str]]
"""From a generator, a length in tokens and a depth of 0 to 1 to a text and the value that continues it."""


@dataclass(frozen=True)
class Needle:
    """Trials of one length and depth: how many were right to the last character, and the share of right characters.

    `every_row`: no selection was in force, every visible compressed row was read.
    """

    tokens: int
    depth: float
    trials: int
    exact: int
    characters: float
    every_row: bool = False


def hit_rate(needles: Sequence[Needle]) -> Estimate:
    """Share of exact answers; its error is never 0, since few trials that all went well prove little."""
    trials, exact = sum(n.trials for n in needles), sum(n.exact for n in needles)
    likely = (exact + 1) / (trials + 2)
    return Estimate(exact / trials, math.sqrt(likely * (1 - likely) / trials))


def needle_maker(tokenizer: Tokenizer, filler: Sequence[str]) -> MakePrompt:
    """Prompts in the form that the model was trained to answer, filled up with `filler` texts."""
    from orchestrator.corpus.retrieval import needle_prompt

    def make(rng: random.Random, tokens: int, depth: float) -> tuple[str, str]:
        return needle_prompt(rng, tokens, depth, filler=filler, count=lambda text: len(tokenizer.encode(text)))

    return make


def measure_needles(
    model: Transformer,
    tokenizer: Tokenizer,
    make: MakePrompt,
    length: int,
    depth: float,
    trials: int,
    *,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _: None,
) -> Needle:
    """Greedy answers after a prefill as the engine's, with the decoder on the prompt's tail."""
    exact, characters = 0, 0.0
    for trial in range(trials):
        text, answer = make(random.Random(f"{seed}/{length}/{depth}/{trial}"), length, depth)
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        given = answer_of(model, tokenizer, begin + tokenizer.encode(text), len(answer))
        exact += given == answer
        characters += sum(a == b for a, b in zip(given, answer, strict=False)) / len(answer)
        tick(length)
    return Needle(length, depth, trials, exact, characters / trials)


def answer_of(model: Transformer, tokenizer: Tokenizer, prompt: list[int], characters: int) -> str:
    """The first `characters` characters of the greedy continuation."""
    config = model.config
    lower = plan_decoder_tail(len(prompt), config.sliding_window, config.draft_length).start
    most = 2 * characters  # control tokens spell nothing, so that a model may need more tokens than characters
    feeder = Feeder(model, 1, len(prompt) + most)
    logits = feeder.run(Piece(0, prompt, 0, len(prompt), "last", Bounds(decoder_lower=lower)))
    tokens: list[int] = []
    while True:
        tokens.append(int(torch.argmax(logits[-1])))  # the lowest id among equals
        text = tokenizer.decode(tokens)
        if len(text) >= characters or len(tokens) >= most:
            return text[:characters]
        known = prompt + tokens
        logits = feeder.step([Piece(0, known, len(known) - 1, len(known), "all", Bounds(decoder_lower=lower))])
