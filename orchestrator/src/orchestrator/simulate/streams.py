"""Random numbers of a run: one seed, a stream of its own for each purpose."""

from __future__ import annotations

from random import Random


class Streams:
    """Streams by name. That one purpose draws more or less never shifts another's numbers, so a shrunk run (fewer
    faults, fewer requests) keeps the rest of its history as far as it can."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[str, Random] = {}

    def __call__(self, name: str) -> Random:
        """The stream of this name; the same object each time."""
        stream = self._made.get(name)
        if stream is None:
            stream = self._made[name] = Random(f"fathom simulate {self.seed} {name}")
        return stream
