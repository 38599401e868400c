"""Which files are worth learning from: no generated data, no copies, and not too much of one source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from orchestrator.corpus.document import Document, line_keys, order_key

SMALLEST, LARGEST = 200, 400_000  # characters
TEST_SHARE = 0.2
"""Tests of a source may add so much to its other code: they repeat themselves."""

_TEST = re.compile(r"(^|/)(tests?|testing|idle_test|conftest\.py)(/|$)|(^|/)test_[^/]*$|_test\.py$")
_GENERATED = re.compile(r"(?i)auto-?(matically )?-?generated|generated (by|from|file)|do not edit|do not modify")


def is_test(name: str) -> bool:
    """Whether a path names a test."""
    return _TEST.search(name) is not None


def why_not(text: str) -> str | None:
    """The reason to leave a text out, or None."""
    size = len(text)
    if not SMALLEST <= size <= LARGEST:
        return "size"
    lines = text.splitlines()
    if max(map(len, lines)) > 1000 or size / len(lines) > 90:
        return "long lines"
    if _GENERATED.search(text[:1500]):
        return "generated"
    inked = sum(map(len, text.split()))
    if sum(map(text.count, "0123456789")) > 0.2 * inked:
        return "numbers"
    if not text.isascii() and len(text.encode()) - size > 0.1 * size:
        return "not ASCII"
    return None


class Copies:
    """Tells new texts from copies: of everything taken so far it keeps the digests of the lines."""

    def __init__(self, share: float = 0.5) -> None:
        """`share` is the largest part of lines that a new text may have in common with earlier ones."""
        self.share = share
        self._lines: set[bytes] = set()
        self._texts: set[str] = set()

    def why_not(self, text: str) -> str | None:
        """ "exact copy", "near copy" or None. If None, later texts are compared with this one too."""
        if text in self._texts:
            return "exact copy"
        keys = line_keys(text)
        if sum(key in self._lines for key in keys) > self.share * len(keys):
            return "near copy"
        self._texts.add(text)
        self._lines.update(keys)
        return None


def limited(documents: Iterable[Document], limit: int, seed: int, accept: Callable[[Document], bool]) -> list[Document]:
    """Documents that `accept` agrees to, at most `limit` characters, in order of name.

    They are picked at random, but alike on every machine, tests last: those come to at most `TEST_SHARE` of the rest.
    `accept` is asked of a document only if there is room for it.
    """
    ordered = sorted(documents, key=lambda document: (is_test(document.name), order_key(seed, document.name)))
    taken: list[Document] = []
    total, plain = 0, 0
    for document in ordered:
        size, test = len(document.text), is_test(document.name)
        room = min(limit, round(plain * (1 + TEST_SHARE))) if test else limit
        if total + size <= room and accept(document):
            taken.append(document)
            total += size
            plain += 0 if test else size
    return sorted(taken, key=lambda document: document.name)
