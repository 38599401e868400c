"""Time to the first token and time per token, by how many clients there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from bench.service import asks
from bench.service.answers import Answer
from bench.service.clients import run_crowd
from bench.service.park import Park


def measure(
    park: Park, model: str, counts: Sequence[int], *, rounds: int = 3, tokens: int = 64, words: int = 400,
    seed: int = 1, step: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row a count of clients; each client sends `rounds` requests of distinct prompts, one after the other."""
    rows = []
    for at_once in counts:
        some = [
            asks.one(seed + at_once, number, model=model, kind="long", protocol="chat", tokens=tokens, long=words)
            for number in range(rounds * at_once)
        ]
        began = time.monotonic()
        answers = run_crowd(park.url, some, at_once=at_once, done=lambda ask, answer: step())
        seconds = time.monotonic() - began
        rows.append({"shape": park.shape.title, "at_once": at_once, **figures(list(answers.values()), seconds)})
    return rows


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Of answers without trouble; times in milliseconds."""
    whole = [answer for answer in answers if not answer.trouble]
    first = [answer.first * 1e3 for answer in whole if answer.first is not None]
    token = [answer.per_token * 1e3 for answer in whole if answer.per_token is not None]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(whole),
        "prompt_tokens": round(median(answer.prompt for answer in whole)) if whole else 0,
        "first_ms": spread(first),
        "token_ms": spread(token),
        "tokens_a_second": sum(answer.completion for answer in whole) / seconds,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile, largest; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"p50": median(ordered), "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], "max": ordered[-1]}
