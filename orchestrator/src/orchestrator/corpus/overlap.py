"""Keeps held-out texts out of the training texts, copies and excerpts included."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from orchestrator.corpus.document import line_keys


class Guard:
    """Measures how much of a text is held out, and how much of a held-out text it gives away."""

    def __init__(self, heldout: Iterable[tuple[str, str]], share: float = 0.15) -> None:
        """`share` is the largest part of lines that may coincide, seen from either side."""
        self.share = share
        self._owners: dict[bytes, list[str]] = defaultdict(list)
        self._lines: dict[str, int] = {}
        for name, text in heldout:
            keys = set(line_keys(text))
            self._lines[name] = len(keys)
            for key in keys:
                self._owners[key].append(name)

    def overlap(self, text: str) -> float:
        """The larger of: the part of this text's lines found in any held-out text, and the part of any one held-out
        text's lines found here. 0 to 1."""
        keys = line_keys(text)
        shared = [key for key in keys if key in self._owners]
        if not shared:
            return 0.0
        given = Counter(name for key in set(shared) for name in self._owners[key])
        return max(len(shared) / len(keys), *(count / self._lines[name] for name, count in given.items()))

    def passes(self, text: str) -> bool:
        """Whether the text may be trained on."""
        return self.overlap(text) <= self.share
