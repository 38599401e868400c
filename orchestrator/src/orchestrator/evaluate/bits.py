"""Bits per byte of held-out text, and what each saving of the serving path costs of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from orchestrator.evaluate.every_row import reading_every_row
from orchestrator.evaluate.feed import Bounds, Feeder, Piece
from orchestrator.evaluate.statistics import ratio_of_sums
from orchestrator.evaluate.text import Window
from orchestrator.model.transformer import Transformer
from swa_replay import plan_decoder_tail, plan_encoder_replay

Logits = Callable[[torch.Tensor], torch.Tensor]
"""From tokens int64 [T] to logits float32 [T, V] of the token after each."""
Tick = Callable[[int], None]
"""Told of tokens that were computed."""

SCORED = 256
"""Tokens scored after a prompt or a prefix hit."""
AFTER_HIT = 128
"""Of these, how many still belong to the prompt where the decoder tail is replayed after a hit too."""


@dataclass(frozen=True)
class Bits:
    """Bits per byte of one way to run the model.

    `ratio` is that over the exact run of the engine on the same tokens; errors are standard errors, by bootstrap over
    windows, so that of the ratio is of paired differences.
    """

    name: str
    bits_per_byte: float
    stderr: float
    ratio: float
    ratio_stderr: float
    windows: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class _Scores:
    """Nats of each target: entry i of window w is its token `first + i`."""

    first: int
    nats: list[torch.Tensor]


def model_bits(
    model: Transformer, windows: Sequence[Window], *, reference: Logits | None = None, tick: Tick = lambda _: None
) -> list[Bits]:
    """The engine as trained, without quantised caches, without selection, the reference, and with decoder replay.

    Every window is a cold prompt. For decoder replay its last `SCORED` tokens follow a prompt that ran the decoder on
    its last `keep_tokens` only; that ratio compares the same tokens of the exact run.
    """
    size = _length(windows)
    exact = _whole(model, windows, True, tick)
    rows = [
        _row("engine", windows, exact, exact),
        _row("unquantised", windows, _whole(model, windows, False, tick), exact),
        _row("every row read", windows, _whole(reading_every_row(model, size), windows, True, tick), exact),
    ]
    if reference is not None:
        nats = []
        for window in windows:
            tokens = torch.tensor(window.tokens)
            nats.append(_nats(reference(tokens)[:-1], window.tokens[1:]))
            tick(size)
        rows.append(_row("reference", windows, _Scores(1, nats), exact))
    if size - SCORED > model.config.keep_tokens:
        feeder, nats = Feeder(model, 1, size), []
        for window in windows:
            nats.append(_after_prompt(feeder, window, size - SCORED))
            tick(size // 2)
        rows.append(_row("decoder replay", windows, _Scores(size - SCORED, nats), exact))
    return rows


def replay_bits(model: Transformer, windows: Sequence[Window], hit: int, tick: Tick = lambda _: None) -> list[Bits]:
    """A request that finds the global rows of its first `hit` tokens and rebuilds the windows from the last of them.

    Windows have `hit` + `SCORED` tokens, of which those after the hit are scored: cold with all rows ("exact"), cold
    with the decoder on the tail of the prompt only, after the hit, and after the hit with the decoder tail too. Where
    the decoder tail is replayed, the prompt ends `AFTER_HIT` tokens after the hit and what follows it is scored.
    """
    size, config = _length(windows), model.config
    if size != hit + SCORED:
        raise ValueError(f"windows: got {size} tokens each, allowed is {hit + SCORED}, the hit and {SCORED} more")
    plan = plan_encoder_replay(hit, size, config.sliding_window)
    prompt = hit + AFTER_HIT
    feeder = Feeder(model, 1, size)
    runs: dict[str, list[torch.Tensor]] = {"exact": [], "decoder replay": [], "hit": [], "hit, decoder replay": []}
    for window in windows:
        tokens = window.tokens
        feeder.run(Piece(0, tokens, 0, hit, logits="none"))
        runs["exact"].append(_nats(feeder.run(Piece(0, tokens, hit, size))[:-1], tokens[hit + 1 :]))
        for name in ("hit", "hit, decoder replay"):
            feeder.forget_windows(0)
            bounds = Bounds(plan.lower, plan.lower, plan.write_floor)
            if name == "hit":
                feeder.run(Piece(0, tokens, plan.start, hit, "none", bounds))
                logits = feeder.run(Piece(0, tokens, hit, size, "all", bounds))
                runs[name].append(_nats(logits[:-1], tokens[hit + 1 :]))
            else:
                tail = plan_decoder_tail(prompt, config.sliding_window, config.draft_length).start
                bounds = replace(bounds, decoder_lower=max(tail, plan.lower))
                runs[name].append(_after_prompt(feeder, window, prompt, plan.start, bounds))
        feeder.forget_windows(0)
        runs["decoder replay"].append(_after_prompt(feeder, window, prompt))
        tick(size + size // 2 + 2 * (size - plan.start))
    exact = _Scores(hit + 1, runs["exact"])
    firsts = {"exact": hit + 1, "hit": hit + 1}
    return [_row(name, windows, _Scores(firsts.get(name, prompt), nats), exact) for name, nats in runs.items()]


def _whole(model: Transformer, windows: Sequence[Window], quantised: bool, tick: Tick) -> _Scores:
    """Cold prompts with every row through the decoder."""
    size = _length(windows)
    feeder, nats = Feeder(model, 1, size, quantised=quantised), []
    for window in windows:
        nats.append(_nats(feeder.run(Piece(0, window.tokens, 0, size))[:-1], window.tokens[1:]))
        tick(size)
    return _Scores(1, nats)


def _after_prompt(
    feeder: Feeder, window: Window, prompt: int, start: int = 0, bounds: Bounds | None = None
) -> torch.Tensor:
    """Nats of the tokens from `prompt` on, after a prompt of that many with the decoder on its tail only."""
    config, tokens = feeder.model.config, window.tokens
    if bounds is None:
        bounds = Bounds(decoder_lower=plan_decoder_tail(prompt, config.sliding_window, config.draft_length).start)
    last = feeder.run(Piece(0, tokens, start, prompt, "last", bounds))
    rest = feeder.run(Piece(0, tokens, prompt, len(tokens), "all", bounds))
    return _nats(torch.cat([last, rest[:-1]]), tokens[prompt:])


def _nats(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """float64 [T]: negative log-likelihood of each target under its row."""
    ids = torch.tensor(targets)
    return torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none").double()


def _row(name: str, windows: Sequence[Window], scores: _Scores, exact: _Scores) -> Bits:
    bits = [float(n.sum()) / math.log(2) for n in scores.nats]
    same = [float(n[scores.first - exact.first :].sum()) / math.log(2) for n in exact.nats]
    sizes = [float(sum(w.bytes[scores.first :])) for w in windows]
    own, ratio = ratio_of_sums(bits, sizes), ratio_of_sums(bits, same)
    tokens = sum(len(n) for n in scores.nats)
    return Bits(name, own.value, own.stderr, ratio.value, ratio.stderr, len(windows), tokens, int(sum(sizes)))


def _length(windows: Sequence[Window]) -> int:
    sizes = {len(w.tokens) for w in windows}
    if len(sizes) != 1:
        raise ValueError(f"windows: got lengths {sorted(sizes)}, allowed is one length, and at least one window")
    return sizes.pop()
