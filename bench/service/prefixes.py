"""Time to the first token of a prompt that nobody knows, that this worker knows, and that only the store knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.service import asks, faults
from bench.service.answers import Answer
from bench.service.clients import complaints, run_crowd
from bench.service.latency import spread
from bench.service.park import Park

COLD, HOT, STORED = "cold", "again, same workers", "again, prefill workers started anew"


def measure(
    park: Park, model: str, *, prompts: int = 4, words: int = 4000, seed: int = 1005,
    step: Callable[[], None] = lambda: None, warm: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row a way. The last one kills every prefill worker in between, so that only the shared store can help; `warm`
    is called before that."""
    some = [
        asks.one(seed, number, model=model, kind="long", protocol="chat", tokens=8, long=words)
        for number in range(prompts)
    ]
    rows: list[dict[str, Any]] = []
    expected: dict[str, Answer] = {}
    for way in (COLD, HOT, STORED):
        if way == STORED:
            if not park.shape.cluster:
                break
            park.wait_idle()
            warm()
            for worker in park.workers():
                if worker.role == "prefill":
                    faults.kill(park, worker)
            park.wait(lambda: all(w.life > 1 for w in park.workers() if w.role == "prefill"), 120, "to start anew")
            park.wait_up()
        answers = run_crowd(park.url, some, at_once=1, done=lambda ask, answer: step())
        expected = expected or answers
        rows.append({
            "shape": park.shape.title, "way": way,
            "prompt_tokens": sum(a.prompt for a in answers.values()) // prompts,
            "cached_tokens": sum(a.cached for a in answers.values()) // prompts,
            "first_ms": spread([a.first * 1e3 for a in answers.values() if a.first is not None]),
            "different": len(complaints(expected, answers)),
        })  # fmt: skip
    return rows
