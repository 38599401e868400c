"""Ranks whose links to one another are fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernel_core.check import require

Domain = int | tuple[int, ...]
"""So many ranks in a row (0: all of them), or the number of each rank's domain: after a failure rows have gaps."""


def check_domain(name: str, domain: Domain) -> None:
    """ValueError unless it can be one."""
    numbers = (domain,) if isinstance(domain, int) else domain
    require(all(n >= 0 for n in numbers), name, domain, "0 or more")


def domains(domain: Domain, ranks: int) -> np.ndarray:
    """int64 [ranks], the number of each rank's domain."""
    if isinstance(domain, int):
        return np.arange(ranks) // domain if domain else np.zeros(ranks, np.int64)
    require(len(domain) == ranks, "domain", f"{len(domain)} numbers", f"{ranks}, one a rank")
    return np.array(domain, np.int64)


def several(domain: Domain, ranks: int) -> bool:
    """Whether some links are slow."""
    return len(set(domains(domain, ranks).tolist())) > 1


def of_members(domain: int, members: Sequence[int]) -> Domain:
    """Of the workers that are left, by number, where `domain` workers in a row shared fast links at the start."""
    return tuple(worker // domain for worker in members) if domain else 0
