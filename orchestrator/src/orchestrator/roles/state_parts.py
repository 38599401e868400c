"""What travels of a request from prefill to decode, and from one decode worker to another: kinds, lengths, checksums.

Tokens depend on every kind, so a state without one of them is never continued.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal, get_args

from msgspec import Struct

Kind = Literal["global", "window", "tail", "lookback", "drafter", "sampler", "grammar"]

KINDS: tuple[Kind, ...] = get_args(Kind)
REPLAYED: frozenset[Kind] = frozenset({"window", "tail", "drafter"})  # what a replay of the prompt's end makes anew
REPLAY_TOKENS = 128


class Part(Struct, frozen=True, gc=False):
    """One piece of a state: `length` bytes with `checksum` (`checksum_of`). A large kind may have several parts."""

    kind: Kind
    length: int
    checksum: int


class Manifest(Struct, frozen=True, gc=False):
    """What a sender says that it sends.

    Attributes:
        layout: tag of the byte layout; a receiver refuses one that it does not know.
        tokens: positions that have their rows.
        output: tokens generated so far, those that were not given out yet included; the last one has no rows yet.
        replay_tail: the sender stopped behind the producer of the last global rows (layer 20), so the receiver
            computes the last min(tokens, REPLAY_TOKENS) positions of the layers behind it before it samples.
        parts: in the order in which they are numbered.
        reason: "stop" or "length" where the output has come to its end already; there are no parts then.
        cached: prompt tokens that were not computed.
        notes: beside the last tokens of `output`, what is to be told of each, see `messages.Tokens`.
    """

    layout: str
    tokens: int
    output: tuple[int, ...]
    replay_tail: bool
    parts: tuple[Part, ...]
    reason: str = ""
    cached: int = 0
    notes: tuple[bytes, ...] = ()


def checksum_of(payload: bytes) -> int:
    """CRC-32 of the bytes."""
    return zlib.crc32(payload)


def part_of(kind: Kind, payload: bytes) -> Part:
    return Part(kind, len(payload), checksum_of(payload))


def fault_of(manifest: Manifest, layout: str, prompt: int, output: Sequence[int], *, grammar: bool) -> str:
    """Why a state with this manifest cannot be continued; empty if it can.

    Args:
        layout: the tag that the receiver knows. prompt: tokens of the prompt. output: what the receiver was told was
            generated before; the manifest may know more. grammar: whether the request has one.
    """
    if manifest.layout != layout:
        return f"layout {manifest.layout!r}, known is {layout!r}"
    if manifest.reason:
        return "" if manifest.output[: len(output)] == tuple(output) else "output differs from what was given out"
    absent = set(KINDS) - {part.kind for part in manifest.parts}
    if absent:
        return f"no {', '.join(sorted(absent))}"
    if manifest.output[: len(output)] != tuple(output):
        return "output differs from what was given out"
    rows = prompt + max(0, len(manifest.output) - 1)
    if manifest.tokens not in (rows, prompt + len(manifest.output)):
        return f"{manifest.tokens} positions, {rows} are needed"
    for part in manifest.parts:
        optional = (part.kind == "grammar" and not grammar) or (manifest.replay_tail and part.kind in REPLAYED)
        if part.length == 0 and not optional and part.kind not in _MAY_BE_EMPTY:
            return f"{part.kind} is empty"
    return ""


# A compressed row may just have been completed, one token has nothing to look back on, a sender may not draft.
_MAY_BE_EMPTY: frozenset[Kind] = frozenset({"tail", "lookback", "drafter"})


def is_whole(part: Part, payload: bytes) -> bool:
    """Whether what came is what was announced."""
    return len(payload) == part.length and checksum_of(payload) == part.checksum
