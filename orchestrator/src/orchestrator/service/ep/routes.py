"""Which rank has which request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from orchestrator.roles.messages import Key


class Routes:
    """A request stays where it began. A new one goes where fewest are, and of those where fewest tokens are."""

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._rank_of: dict[Key, int] = {}
        self._tokens: dict[Key, int] = {}
        self._count: Counter[int] = Counter()
        self._load: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._rank_of)

    def restart(self, ranks: Iterable[int]) -> None:
        """These ranks, without any request."""
        self._ranks = tuple(ranks)
        for held in (self._rank_of, self._tokens, self._count, self._load):
            held.clear()

    def find(self, key: Key) -> int | None:
        return self._rank_of.get(key)

    def give(self, key: Key, tokens: int) -> int:
        """The rank of a request, chosen if it is new; `tokens` of cache that it is known to take."""
        rank = self._rank_of.get(key)
        if rank is None:
            rank = min(self._ranks, key=lambda r: (self._count[r], self._load[r], r))
            self._rank_of[key] = rank
            self._count[rank] += 1
        self._load[rank] += tokens - self._tokens.get(key, 0)
        self._tokens[key] = tokens
        return rank

    def rename(self, key: Key, new: Key) -> int | None:
        """The rank of a request that has another key from now on; None for an unknown one."""
        rank = self._rank_of.pop(key, None)
        if rank is not None:
            self._rank_of[new] = rank
            self._tokens[new] = self._tokens.pop(key)
        return rank

    def forget(self, key: Key) -> int | None:
        """The rank that had a request; None for an unknown one."""
        rank = self._rank_of.pop(key, None)
        if rank is not None:
            self._count[rank] -= 1
            self._load[rank] -= self._tokens.pop(key)
        return rank

    def split(self, keys: Iterable[Key]) -> dict[int, list[Key]]:
        """Requests by rank; unknown ones are left out."""
        found: dict[int, list[Key]] = {}
        for key in keys:
            rank = self._rank_of.get(key)
            if rank is not None:
                found.setdefault(rank, []).append(key)
        return found
