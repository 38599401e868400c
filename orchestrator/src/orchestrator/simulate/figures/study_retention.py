"""What keeping the cache longer is worth: hits, prefill GPUs, and what has to be stored for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.measure import balanced_seconds
from orchestrator.simulate.figures.service import Cluster
from orchestrator.simulate.figures.sharing import together
from orchestrator.simulate.figures.traces import Session
from orchestrator.simulate.figures.workload import Arrivals, Pattern

HOUR = 3600.0
LIVES = (300.0, 0.5 * HOUR, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, 24 * HOUR, 72 * HOUR, 168 * HOUR)


def retention(sessions: Sequence[Session], cluster: Cluster, lives: Sequence[float] = LIVES) -> list[dict[str, Any]]:
    """For each life of a block after its last use, in seconds: what follows for a steady request a second.

    Keys: life, hit_rate, missed (tokens a request, with the replay of 128), and for 1,000 requests a second gpus (of
    prefill, at the published 60,000 missed tokens), even_gpus (the same in a perfectly balanced run), written (bytes a
    second) and stored (bytes), both before erasure code.
    """
    gaps = together([s.gaps for s in sessions])
    requests = sum(len(s.times) for s in sessions)
    found = []
    for life in lives:
        asked = Pattern.of(sessions, life).requests
        computed = asked.tokens - np.where(asked.hits > 128, asked.hits - 128, 0)
        per_request = float(computed.mean())
        found.append(
            {
                "life": life,
                "hit_rate": float(asked.hits.sum() / asked.tokens.sum()),
                "missed": per_request,
                "gpus": 1000 * per_request / p.PREFILL_MISSED.value,
                "even_gpus": 1000 * float(balanced_seconds(asked, cluster).mean()),
                "written": 1000 * gaps.written(life) / requests * p.TOKEN_BYTES.value,
                "stored": 1000 * gaps.held(life) / requests * p.TOKEN_BYTES.value,
            }
        )
    return found


def missed_shares(asked: Arrivals, edges: Sequence[int]) -> dict[str, list[float]]:
    """Parts of requests and of missed tokens by bin, for prompts binned by length and by missed tokens."""
    found = {}
    for name, key in (("length", asked.tokens), ("missed", asked.missed)):
        which = np.searchsorted(np.array(edges), key, side="right")
        count = np.bincount(which, minlength=len(edges) + 1) / len(asked)
        work = np.bincount(which, asked.missed, minlength=len(edges) + 1) / max(1, asked.missed.sum())
        found[f"requests by {name}"] = [float(x) for x in count]
        found[f"missed tokens by {name}"] = [float(x) for x in work]
    return found
