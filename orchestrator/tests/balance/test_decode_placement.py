"""Placement over decode engines, by two dimensions and by the rules that it is compared with."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.balance.decode import (
    DecodeEngine,
    Incoming,
    PowerOfTwo,
    RoundRobin,
    choose_group,
    fewest_requests,
    fewest_tokens,
    need,
    place,
    two_dimensional,
)

RULES = {
    "two": two_dimensional,
    "requests": fewest_requests,
    "tokens": fewest_tokens,
    "robin": RoundRobin(),
    "power": PowerOfTwo(random.Random(1)),
}


@pytest.mark.parametrize("rule", RULES)
@given(
    rooms=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 3000), max_size=12),
)
def test_room_is_never_passed_and_the_head_is_never_skipped(rule, rooms, lengths):
    engines = [DecodeEngine(f"e{i}", room=room, rows=4) for i, room in enumerate(rooms)]
    queue = [Incoming(f"r{i}", n, need(n, 50)) for i, n in enumerate(lengths)]
    placed = place(engines, queue, RULES[rule])
    assert [p.request for p, _ in placed] == [q.request for q in queue[: len(placed)]]
    used: dict[str, int] = defaultdict(int)
    for incoming, engine in placed:
        used[engine.name] += incoming.need
    for engine, room in zip(engines, rooms, strict=True):
        assert engine.room == room - used[engine.name] >= 0 and engine.requests <= 4
    if len(placed) < len(queue):  # the next one has no engine, or does not fit into what is free in sum
        nxt = queue[len(placed)]
        assert not any(e.has_room(nxt.need) for e in engines) or nxt.need > sum(e.room for e in engines)


def test_long_to_few_tokens_short_to_few_requests():
    full = DecodeEngine("many-short", requests=40, tokens=40_000, room=10**6)
    long = DecodeEngine("few-long", requests=3, tokens=300_000, room=10**6)
    ((_, chosen),) = place([full, long], [Incoming("short", 500, 900)])
    assert chosen is full or chosen.tokens <= 1.05 * 340_500 / 2
    ((_, chosen),) = place([full, long], [Incoming("long", 200_000, 201_000)])
    assert chosen is full


def test_need_leaves_room_for_growth_and_steps_in_flight():
    assert need(1000, 400) == 1000 + 500 + 12
    with pytest.raises(ValueError, match="length"):
        need(-1, 0)


def test_groups():
    a, b = DecodeEngine("a", tokens=10, room=100), DecodeEngine("b", tokens=5, room=10)
    assert choose_group({"x": [a], "y": [b]}, Incoming("r", 5, 8)) == "y"
    assert choose_group({"x": [a], "y": [b]}, Incoming("r", 5, 50)) == "x"
    assert choose_group({"x": [a], "y": [b]}, Incoming("r", 5, 500)) is None
    assert place([], [Incoming("r", 1, 1)]) == []


def _mean_step(rule, seed=0, engines=16, requests=4000):
    """Mean step time in lockstep, max rows and max tokens over engines, lengths as agents have them."""
    rng = random.Random(seed)
    pool = [DecodeEngine(f"e{i:02}", room=30_000_000) for i in range(engines)]
    running: list[tuple[int, DecodeEngine, int]] = []
    total = 0.0
    for n in range(requests):
        length = int(min(900_000, rng.lognormvariate(11.2, 1.1)))
        ((_, engine),) = place(pool, [Incoming(str(n), length, length)], rule)
        running.append((n + int(rng.expovariate(1 / 480)), engine, length))
        for item in [r for r in running if r[0] <= n]:
            running.remove(item)
            item[1].requests -= 1
            item[1].tokens -= item[2]
            item[1].room += item[2]
        rows, tokens = max(e.requests for e in pool), max(e.tokens for e in pool)
        total += 8.0 + 0.06 * rows + 1.2e-6 * tokens
    return total / requests


def test_two_dimensions_beat_the_simple_rules():
    two = _mean_step(two_dimensional)
    for other in (fewest_requests, fewest_tokens, RoundRobin(), PowerOfTwo(random.Random(2))):
        assert two <= _mean_step(other) * 1.001
    assert two < 0.97 * _mean_step(RoundRobin())
