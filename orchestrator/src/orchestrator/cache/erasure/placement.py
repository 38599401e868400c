"""Which target holds which shard: rendezvous hashing, spread over failure domains."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from orchestrator.cache.erasure.code import PARITY, SHARDS


def ranked(stripe: int, targets: Mapping[str, str]) -> list[str]:
    """Targets in the stripe's own order of preference; the order of the others stays when one comes or goes."""

    def weight(target: str) -> bytes:
        return hashlib.blake2b(f"{stripe:016x}{target}".encode(), digest_size=8).digest()

    return sorted(targets, key=weight)


def place(stripe: int, targets: Mapping[str, str]) -> list[str]:
    """A target for each of the twelve shards, all different.

    Args:
        targets: name -> failure domain of the targets that take writes.

    Raises:
        ValueError: the loss of one domain would take more than two shards, or there are fewer than twelve targets.
    """
    domains = Counter(targets.values())
    most = next((n for n in range(1, PARITY + 1) if sum(min(n, c) for c in domains.values()) >= SHARDS), None)
    if most is None:
        raise ValueError(
            f"targets: got {len(targets)} in {len(domains)} failure domains, allowed are {SHARDS} or more of which "
            f"{SHARDS} can be chosen with at most {PARITY} in one domain"
        )
    used: Counter[str] = Counter()
    chosen: list[str] = []
    for target in ranked(stripe, targets):
        if used[targets[target]] < most and len(chosen) < SHARDS:
            used[targets[target]] += 1
            chosen.append(target)
    return chosen


def replacement(stripe: int, held: list[str], lost: str, targets: Mapping[str, str]) -> str | None:
    """Where a shard of `lost` goes: the best target that holds none of this stripe, in a domain with room."""
    others = [target for target in held if target != lost]
    domains = Counter(targets[target] for target in others if target in targets)
    for target in ranked(stripe, targets):
        if target not in others and domains[targets[target]] < PARITY:
            return target
    return None
