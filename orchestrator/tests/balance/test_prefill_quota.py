"""A step over ranks: same time for all, limit on tokens, nobody starves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.balance.prefill import BLOCK, PUBLISHED, PrefillCost, Quota, Waiting, agree, fill, plan

queues = st.lists(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 200_000)), max_size=6), min_size=1, max_size=8
).map(
    lambda ranks: [
        [Waiting(f"{r}.{i}", BLOCK * c, n) for i, (c, n) in enumerate(queue)] for r, queue in enumerate(ranks)
    ]
)


@given(queues, st.integers(BLOCK, 100_000))
def test_step(ranks, tokens):
    quota = Quota(tokens=tokens)
    seconds, steps = plan(PUBLISHED, ranks, quota)
    assert quota.least <= seconds <= quota.most
    total = 0
    for queue, step in zip(ranks, steps, strict=True):
        assert [r for r, _ in step] == [w.request for w in queue[: len(step)]], "first in, first out"
        assert bool(step) == bool(queue) or tokens < len(ranks) * BLOCK
        for (_, chunk), waiting in zip(step, queue, strict=False):
            assert 0 < chunk.tokens <= waiting.remaining and chunk.computed == waiting.computed
            assert chunk.final == (chunk.tokens == waiting.remaining)
        assert all(chunk.final for _, chunk in step[:-1]), "only the last is cut"
        alone = len(step) == 1 and step[0][1].tokens <= BLOCK
        assert alone or PUBLISHED.step([c for _, c in step]) <= seconds * (1 + 1e-9)
        total += sum(c.tokens for _, c in step)
    assert total <= max(tokens, len(ranks))


@given(queues)
def test_every_prompt_ends(ranks):
    left = {w.request: w for queue in ranks for w in queue}
    for _ in range(2000):
        live = [[left[w.request] for w in queue if w.request in left] for queue in ranks]
        if not any(live):
            return
        for step in plan(PUBLISHED, live, Quota(tokens=50_000))[1]:
            for request, chunk in step:
                w = left.pop(request)
                if not chunk.final:
                    left[request] = Waiting(request, w.computed + chunk.tokens, w.remaining - chunk.tokens)
    raise AssertionError(f"{len(left)} prompts never ended")


def test_a_quota_too_short_for_a_block_still_moves_the_oldest():
    slow = PrefillCost(1.0, 1.0)
    ((_, chunk),) = fill(slow, [Waiting("a", 100, 5000), Waiting("b", 0, 10)], 0.05)
    assert chunk.tokens == 28, "up to the next block"


def test_agreed_time_is_that_of_the_largest_oldest():
    ranks = [[Waiting("a", 0, 1000)], [], [Waiting("b", 0, 10_000), Waiting("c", 0, 10**6)]]
    assert agree(PUBLISHED, ranks, Quota()) == pytest.approx(PUBLISHED.launch + 0.1074)
    assert agree(PUBLISHED, [[], []], Quota()) == 0.05
