"""One text of the corpus, and the lines by which texts are compared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LINE_LENGTH = 20
"""Shorter lines (``return None``, ``else:``) say nothing about where a text comes from."""


@dataclass(frozen=True)
class Document:
    """A text with its origin. `kind` is "code" or "docs", `source` the name of the collection it belongs to."""

    name: str
    kind: str
    source: str
    text: str


def line_keys(text: str) -> list[bytes]:
    """Eight-byte digests of the lines that count in comparisons, in order, with repeats, without surrounding space."""
    lines = (line.strip() for line in text.splitlines())
    return [line_key(line) for line in lines if len(line) >= LINE_LENGTH]


def line_key(line: str) -> bytes:
    """Digest of one stripped line."""
    return hashlib.blake2b(line.encode("utf-8", errors="replace"), digest_size=8).digest()


def order_key(seed: int, name: str) -> bytes:
    """A key that sorts names in an order which looks random, and is the same on every machine."""
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()


def clean(data: bytes) -> str | None:
    """Text of a file with plain newlines, or None if it is not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n").lstrip("\ufeff")
