"""Held-out texts, and fixed windows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.text.tokenizer import Tokenizer

Document = tuple[str, str]
"""Name and text."""

JOINED_BELOW = 2048
"""Texts of fewer tokens are joined to one stream: alone most of them would fill no window."""


def heldout_documents() -> list[Document]:
    """Texts that training never saw."""
    from orchestrator.corpus.heldout import heldout_texts

    return list(heldout_texts())


def changed_texts(documents: Sequence[Document]) -> list[str]:
    """A note if the texts here are not those that published figures were taken on; else nothing."""
    from orchestrator.corpus.heldout import differences

    names = differences(documents)
    if not names:
        return []
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return [f"{len(names)} of the held-out texts differ from those of the published figures: {shown}."]


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one document, and the bytes that each of them spells."""

    document: str
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]


class HeldOut:
    """Documents as token streams, each begun with the begin-of-text token and ended as in training."""

    def __init__(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> None:
        if not documents:
            raise ValueError("documents: got none, allowed is at least one")
        self.tokenizer = tokenizer
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        encoded = [(name, [*begin, *tokenizer.encode(text), *tokenizer.eos_ids]) for name, text in documents]
        self.streams = [(name, ids) for name, ids in encoded if len(ids) >= JOINED_BELOW]
        short = [token for _, ids in encoded if len(ids) < JOINED_BELOW for token in ids]
        if short:
            self.streams.append(("short texts", short))

    def windows(self, count: int, length: int) -> list[Window]:
        """Up to `count` windows of `length` tokens that do not overlap, taken in turn from the documents.

        The first of a document starts at its beginning. A document's end that fills no window is left out.

        Raises:
            ValueError: no document has `length` tokens.
        """
        cuts = [
            [(name, stream[at : at + length]) for at in range(0, len(stream) - length + 1, length)]
            for name, stream in self.streams
        ]
        if not any(cuts):
            longest = max(len(stream) for _, stream in self.streams)
            raise ValueError(f"length: got {length}, allowed is at most {longest}, the tokens of the longest text")
        # Spread over each document: the first windows of every one would be imports and licences only.
        cuts = [_spread(c) for c in cuts]
        rounds = (c[i] for i in range(max(map(len, cuts))) for c in cuts if i < len(c))
        return [self._window(name, tokens) for (name, tokens), _ in zip(rounds, range(count), strict=False)]

    def _window(self, name: str, tokens: list[int]) -> Window:
        control = self.tokenizer.is_control
        sizes = tuple(0 if control(t) else len(self.tokenizer.token_bytes(t)) for t in tokens)
        return Window(name, tuple(tokens), sizes)


def _spread(items: list) -> list:
    """The first, then the middle, then the quarters, and so on: any prefix of it covers the whole list."""
    order: list = []
    seen: set[int] = set()
    step = len(items)
    while step and len(order) < len(items):
        for at in range(0, len(items), step):
            if at not in seen:
                seen.add(at)
                order.append(items[at])
        step = -(-step // 2) if step > 1 else 0
    return order
