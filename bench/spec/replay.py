"""Recorded acceptance under another machine's step times: what each policy would gain there."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from bench.spec.point import POLICIES, Point
from orchestrator.balance.cost_curve import CostCurve
from orchestrator.balance.speculation import Budget, survivals
from orchestrator.evaluate.speculate import Trial

STEPS = 300


def curve_of(path: Path) -> CostCurve:
    """A cost curve from the figures of `fathom bench rank` (decode steps), or from a `CostCurve` as JSON.

    A decode step of B sequences stands for a step of B rows: the products and experts see rows either way; attention
    of several rows of one request reads its cache once for each, as here. Raises ValueError for other files.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "steps" in found:
            steps = sorted((s["sequences"], s["device_us"] * 1e-6) for s in found["steps"] if s["kind"] == "decode")
            return CostCurve(tuple(n for n, _ in steps), tuple(t for _, t in steps))
        values = found.get("curve", found)
        return CostCurve(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: got no cost curve ({error}); `fathom bench rank` makes figures of one") from error


def replay(
    trials: Sequence[Trial], curve: CostCurve, sequences: int, *, draft_share: float = 0.0, seed: int = 0
) -> list[Point]:
    """Every policy over the same recorded verifications.

    Each of `sequences` requests walks through the trials of one recorded request after the other, from a place of its
    own. `variable` chooses the total from confidences two steps old and splits it by current ones, as the engine does.
    Drafting takes what the curve says or, if it says nothing, `draft_share` of a step of as many rows as there are
    requests.
    """
    by_request: dict[int, list[Trial]] = {}
    for trial in trials:
        by_request.setdefault(trial.request, []).append(trial)
    if not by_request:
        raise ValueError("trials: got none, allowed is at least one")
    rng = random.Random(seed)
    line = [t for group in by_request.values() for t in group]
    depth = max(len(t.confidence) for t in line)
    starts = [rng.randrange(len(line)) for _ in range(sequences)]
    drafting = curve.draft(sequences) if curve.draft_requests else draft_share * curve.step(sequences)
    return [_policy(policy, line, starts, curve, depth, drafting) for policy in POLICIES]


def _policy(
    policy: str, line: Sequence[Trial], starts: Sequence[int], curve: CostCurve, depth: int, drafting: float
) -> Point:  # fmt: skip
    budget, count = Budget(curve), len(starts)
    seconds = rows = tokens = 0.0
    for step in range(STEPS):
        now = [line[(s + step) % len(line)] for s in starts]
        if policy == "none":
            lengths = [0] * count
        elif policy == "variable":
            old = [line[(s + step - 1) % len(line)].confidence for s in starts]
            lengths = split([t.confidence for t in now], budget.total(count, old))
        else:
            lengths = [depth] * count
        verified = count + sum(lengths)
        seconds += curve.step(verified) + (0.0 if policy == "none" else drafting)
        rows += verified
        tokens += sum(1 + min(t.kept, n) for t, n in zip(now, lengths, strict=True))
    steps = STEPS * count
    return Point("replayed", policy, count, tokens / seconds, rows / steps, tokens / steps, seconds / STEPS * 1e3)


def split(confidences: Sequence[Sequence[float]], total: int) -> list[int]:
    """The `total` likeliest drafts, as `dspark_kernels.schedule` admits them: chance, then place, then request."""
    ranked = sorted(
        (-chance, place, request)
        for request, row in enumerate(confidences)
        for place, chance in enumerate(survivals(row))
    )
    lengths = [0] * len(confidences)
    for _, _, request in ranked[:total]:
        lengths[request] += 1
    return lengths
