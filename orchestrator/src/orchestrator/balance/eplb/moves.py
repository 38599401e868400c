"""What has to be copied from where for a layer to become what a plan says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.balance.eplb.domains import Domain, domains
from orchestrator.balance.eplb.placement import EMPTY

CHECKPOINT = -1  # the source of an expert that no rank alive holds


@dataclass(frozen=True)
class Move:
    """An expert's weights into a slot: from a slot of a rank, or from `CHECKPOINT` (then slot -1)."""

    rank: int
    slot: int
    expert: int
    source_rank: int
    source_slot: int


def moves_of(current: np.ndarray, target: np.ndarray, alive: np.ndarray, domain: Domain = 0) -> list[Move]:
    """Moves of one layer in order of rank and slot.

    Args:
        current, target: int32 [ranks, slots].
        alive: bool [ranks]; others neither receive nor send.
        domain: ranks that share fast links, as in `MoveLimits`; 0 for all.

    A source on the rank itself is taken first, then one in its domain, then the one that sends least so far.
    """
    ranks, slots = np.nonzero((current != target) & (target != EMPTY) & alive[:, None])
    sending = np.zeros(len(current), np.int64)
    group = domains(domain, len(current))
    found = []
    for rank, slot in zip(ranks.tolist(), slots.tolist(), strict=True):
        expert = int(target[rank, slot])
        holders = np.argwhere((current == expert) & alive[:, None])
        if len(holders) == 0:
            found.append(Move(rank, slot, expert, CHECKPOINT, -1))
            continue

        def cost(holder: np.ndarray, rank: int = rank) -> tuple[bool, bool, int, int]:
            source = int(holder[0])
            return source != rank, bool(group[source] != group[rank]), int(sending[source]), source

        source = min(holders, key=cost)
        sending[source[0]] += 1
        found.append(Move(rank, slot, expert, int(source[0]), int(source[1])))
    return found
