"""Streaming clients: each sends one request and notes when which event came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence

import httpx

from bench.service.answers import Answer, difference
from bench.service.asks import Ask

_TRIES = 200
LONGEST = 600.0  # seconds that a client waits for an event


async def answer_of(
    client: httpx.AsyncClient, ask: Ask, *, leave_after: int | None = None, patience: float = LONGEST
) -> Answer:
    """One request to its end. `leave_after`: events after which the client goes away (0: with the headers).

    A refusal (429 or 503 before anything was said) is tried again when the server says so, and counted.
    """
    answer = Answer(began=time.monotonic())
    try:
        for _ in range(_TRIES):
            wait = await _once(client, ask, answer, leave_after, patience)
            if wait is None:
                break
            answer.refusals += 1
            await asyncio.sleep(wait)
        else:
            answer.trouble = f"refused {_TRIES} times"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.trouble = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    return answer


async def _once(
    client: httpx.AsyncClient, ask: Ask, answer: Answer, leave_after: int | None, patience: float
) -> float | None:
    """None when the answer is all there; else seconds until the next try."""
    seen = 0
    async with client.stream("POST", ask.path, json=ask.body, timeout=patience) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            if response.status_code in (429, 503) and "retry-after" in response.headers:
                return min(2.0, float(response.headers["retry-after"]))
            answer.trouble = f"status {response.status_code}: {text[:300]}"
            return None
        async for line in response.aiter_lines():
            if leave_after is not None and seen >= leave_after:
                answer.left = True
                return None
            if not line.startswith("data: "):
                continue
            seen += 1
            if line == "data: [DONE]" or answer.take(ask.protocol, json.loads(line[6:]), time.monotonic()):
                return None
    answer.trouble = "the stream broke off"
    return None


async def crowd(
    url: str,
    asks: Sequence[Ask],
    *,
    at_once: int,
    leave: Callable[[Ask], int | None] = lambda ask: None,
    done: Callable[[Ask, Answer], None] = lambda ask, answer: None,
    gap: float = 0.0,
    seed: int = 0,
) -> dict[str, Answer]:
    """All requests, so many at once; the answers by name. `gap`: mean seconds between two arrivals."""
    rng = random.Random(seed)
    room = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=0)
    found: dict[str, Answer] = {}
    async with httpx.AsyncClient(base_url=url, limits=limits, trust_env=False) as client:

        async def go(ask: Ask) -> None:
            try:
                found[ask.name] = await answer_of(client, ask, leave_after=leave(ask))
                done(ask, found[ask.name])
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for ask in asks:
                await room.acquire()
                group.create_task(go(ask))
                if gap:
                    await asyncio.sleep(rng.expovariate(1 / gap))
    return found


def run_crowd(
    url: str,
    asks: Sequence[Ask],
    *,
    at_once: int,
    leave: Callable[[Ask], int | None] = lambda ask: None,
    done: Callable[[Ask, Answer], None] = lambda ask, answer: None,
    gap: float = 0.0,
) -> dict[str, Answer]:
    """`crowd` for callers without an event loop."""
    return asyncio.run(crowd(url, asks, at_once=at_once, leave=leave, done=done, gap=gap))


def complaints(expected: Mapping[str, Answer], got: Mapping[str, Answer]) -> dict[str, str]:
    """By name, what differs; empty when every client got what it should have."""
    found = {name: difference(expected[name], answer) for name, answer in got.items()}
    return {name: text for name, text in found.items() if text}
