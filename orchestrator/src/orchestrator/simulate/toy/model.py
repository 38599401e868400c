"""The toy model: the next token is a hash over all state that a sequence has, as it lies in the cache.

The real model reads seven kinds of state. Here each kind is a few bytes that follow from the tokens so far, and all of
them are read for every token. A missing row, a row of another request, a window at the wrong place or a grammar that
began anew gives another token at once, and every later token differs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

ROW = 4
"""Bytes of a row of the global kind: one a token."""
WINDOW = 128
"""Tokens that the window kind holds."""
LOOKBACK = 2
"""Tokens before the next one that n-gram lookup needs."""
DRAFT_CONTEXT = 16
"""Tokens that the drafter's context holds."""
VOCAB = 50_000
_CLASSES = 8
_MANY = 32
"""Tokens from which NumPy is quicker."""
END = 1
"""The token that ends an answer; no grammar forbids it."""

KINDS = ("global", "window", "tail", "lookback", "drafter", "sampler", "grammar")
"""All kinds of state, in the order in which they are read."""


def rows(tokens: Sequence[int], start: int, salt: int, tail: bytes = b"") -> bytes:
    """Global rows of `tokens` at positions from `start` on.

    `salt` is the tenant's, so equal texts have unlike rows. The second row of a pair is made with the first one; where
    `start` is odd that is `tail`, and without it the row comes out wrong.
    """
    if len(tokens) >= _MANY and not start & 1:
        return _many_rows(tokens, start, salt)
    made, first = [], int.from_bytes(tail, "little")
    for position, token in enumerate(tokens, start):
        row = (token * 2654435761 + position * 40503 + salt) & 0xFFFFFFFF
        if position & 1:
            row ^= first >> 3
        else:
            first = row
        made.append(row.to_bytes(ROW, "little"))
    return b"".join(made)


def _many_rows(tokens: Sequence[int], start: int, salt: int) -> bytes:
    """The same for whole prompts, which begin at even positions."""
    made = np.array(tokens, np.uint64) * np.uint64(2654435761)
    made += np.arange(start, start + len(tokens), dtype=np.uint64) * np.uint64(40503) + np.uint64(salt)
    short = made.astype("<u4")
    pairs = len(short) // 2
    short[1 : 2 * pairs : 2] ^= short[0 : 2 * pairs : 2] >> 3
    return short.tobytes()


@dataclass(frozen=True)
class Small:
    """The kinds of fixed size after some tokens; the rows lie apart, in blocks.

    Attributes:
        length: tokens absorbed. window: their last WINDOW rows. tail: the row that waits for its pair. lookback,
        drafter: the last tokens. sampler: (seed, position of the next draw). grammar: (name, output tokens taken in,
        class that the next token must have).
    """

    length: int
    window: bytes
    tail: bytes
    lookback: bytes
    drafter: bytes
    sampler: bytes
    grammar: bytes


def begin(seed: int, grammar: str) -> Small:
    """The state before the first token."""
    start = blake2b(grammar.encode(), digest_size=1).digest()[0] % _CLASSES if grammar else _CLASSES
    return Small(0, b"", b"", b"", b"", _sampler(seed, 0), _grammar(grammar, 0, start))


def absorb(small: Small, new_rows: bytes, tokens: Sequence[int], outputs: int) -> Small:
    """The state after `tokens`, whose rows are `new_rows`; the last `outputs` of them are the answer's.

    Raises ValueError where rows and tokens differ in number.
    """
    if len(new_rows) != ROW * len(tokens) or not 0 <= outputs <= len(tokens):
        raise ValueError(f"new_rows: got {len(new_rows)} bytes for {len(tokens)} tokens, {outputs} of them output")
    if not tokens:
        return small
    length = small.length + len(tokens)
    ends = draft_context(tokens)
    seed = int.from_bytes(small.sampler[:8], "little")
    grammar = small.grammar
    for token in tokens[len(tokens) - outputs :]:
        grammar = _advance(grammar, token)
    return Small(
        length,
        (small.window + new_rows)[-WINDOW * ROW :],
        new_rows[-ROW:] if length % 2 else b"",
        (small.lookback + ends)[-LOOKBACK * 4 :],
        (small.drafter + ends)[-DRAFT_CONTEXT * 4 :],
        _sampler(seed, length),
        grammar,
    )


def draft_context(tokens: Sequence[int]) -> bytes:
    """What the drafter's context holds after these tokens."""
    return b"".join([token.to_bytes(4, "little") for token in tokens[-DRAFT_CONTEXT:]])


def advance(small: Small, token: int) -> Small:
    """Only the grammar moved over an output token."""
    return replace(small, grammar=_advance(small.grammar, token))


def at_position(small: Small, length: int) -> Small:
    """Only the position set: a state from which a window's worth of tokens is replayed."""
    return replace(small, length=length)


def next_token(all_rows: bytes, small: Small) -> int:
    """The token that follows. `all_rows` is what the cache gives back for the whole sequence."""
    digest = blake2b(all_rows, digest_size=8)
    for part in (small.window, small.tail, small.lookback, small.drafter, small.sampler, small.grammar):
        digest.update(len(part).to_bytes(2, "little"))
        digest.update(part)
    number = int.from_bytes(digest.digest(), "little")
    token = 2 + number % (VOCAB - 2)
    wanted = small.grammar[0] if small.grammar else _CLASSES
    if wanted < _CLASSES:
        token += wanted - token % _CLASSES  # VOCAB is a multiple of _CLASSES
        token += _CLASSES * (token <= END)
    return token


def obeys(grammar: str, outputs: Sequence[int]) -> bool:
    """Whether an answer, END apart, is one that the grammar allows from its root on."""
    state = begin(0, grammar).grammar
    for token in outputs:
        if token == END:
            continue
        if state[0] < _CLASSES and token % _CLASSES != state[0]:
            return False
        state = _advance(state, token)
    return True


def without(small: Small, kind: str) -> Small:
    """The state as if `kind` had never been carried. For tests and faults."""
    empty = begin(int.from_bytes(small.sampler[:8], "little"), "")
    if kind not in KINDS[1:]:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(KINDS[1:])}")
    return replace(small, **{kind: getattr(empty, kind)})


def _sampler(seed: int, position: int) -> bytes:
    return seed.to_bytes(8, "little") + position.to_bytes(4, "little")


def _grammar(name: str, taken: int, wanted: int) -> bytes:
    return bytes([wanted]) + taken.to_bytes(4, "little") + name.encode()


def _advance(state: bytes, token: int) -> bytes:
    if not state or state[0] >= _CLASSES or token == END:
        return state
    wanted = (3 * state[0] + token // _CLASSES + 1) % _CLASSES
    return bytes([wanted]) + (int.from_bytes(state[1:5], "little") + 1).to_bytes(4, "little") + state[5:]
