"""Where a prompt's computation starts after a prefix hit (docs/kv_cache.md, In the engine). No state, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from orchestrator.model.config import BLOCK_TOKENS
from swa_replay import plan_encoder_replay, usable_hit

PrefixMode = Literal["off", "bounded", "exact", "canonical"]
PREFIX_MODES: tuple[PrefixMode, ...] = ("off", "bounded", "exact", "canonical")
CANONICAL_TOKENS = 2048
"""Canonical mode rebuilds windows at every multiple of this position, in every prompt."""
_NEAR = 2 * BLOCK_TOKENS  # a decoder tail behind a hit never begins further before it


@dataclass(frozen=True)
class Start:
    """How a prompt begins.

    Attributes:
        hit: tokens whose blocks are adopted; no global row below it is written.
        start: first position that is computed.
        lower: no window key below it is seen.
        window: the encoder's window rows before `start` are taken from a snapshot at the boundary `hit`.
    """

    hit: int = 0
    start: int = 0
    lower: int = 0
    window: bool = False


COLD = Start()


def choose_start(
    mode: PrefixMode,
    matched: int,
    length: int,
    decoder_lower: int,
    kept: Callable[[int], bool],
    *,
    window: int,
    stride: int = CANONICAL_TOKENS,
) -> Start:
    """The start that computes least among those that the mode allows.

    A snapshot holds the encoder's windows only, so one behind `decoder_lower` would leave the decoder's out: the last
    at or before it is used, and what follows it is computed exactly as without a cache.

    Args:
        matched: tokens of the prompt whose blocks are there, whole blocks.
        length: tokens of the prompt; at least one is left to compute.
        decoder_lower: first position that the decoder computes.
        kept: whether there is a snapshot at a boundary of this prompt.
        window: window of the attention.
        stride: distance of canonical boundaries, a multiple of 128 above the window.
    """
    matched = usable_hit(matched, length, window_kept=True)
    base, last = 0, True
    if mode == "canonical":
        base = segment(matched, stride)
        last = base == segment(length - 1, stride)
    least = base + BLOCK_TOKENS
    if mode == "bounded":
        least = max(least, matched - _NEAR)
    most = min(matched, decoder_lower) if last else matched
    for boundary in range(most // BLOCK_TOKENS * BLOCK_TOKENS, least - 1, -BLOCK_TOKENS):
        if kept(boundary):
            return Start(boundary, boundary, max(0, base - window), window=True)
    if mode == "canonical" and base:
        return Start(base, base - window, base - window)
    if mode == "bounded" and usable_hit(matched, length, window=window):
        plan = plan_encoder_replay(matched, length, window)
        return Start(plan.hit, plan.start, plan.lower)
    return COLD


def segment(position: int, stride: int) -> int:
    """Where the canonical segment of a position begins."""
    return position // stride * stride


def snapshot_stops(length: int, matched: int, decoder_lower: int, begin: int) -> list[int]:
    """Boundaries above `begin` at which a prompt's windows are worth keeping, ascending.

    The last ones that a prompt which goes on from this one, or repeats it, can start from; and the end of what it
    shares with earlier prompts, since the next one may share the same.
    """
    tail = range(decoder_lower // BLOCK_TOKENS * BLOCK_TOKENS, length + 1, BLOCK_TOKENS)
    recent = [b for b in tail if b > length - 3 * BLOCK_TOKENS]  # an untrimmed decoder begins at 0
    return sorted({b for b in (*recent, matched) if b > begin})
