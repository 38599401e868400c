"""The cost of a step, its inverse, and learning it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.balance.prefill import BLOCK, PUBLISHED, Chunk, CostFit, PrefillCost

costs = st.builds(
    PrefillCost,
    launch=st.floats(0, 0.05),
    token=st.floats(1e-7, 1e-4),
    prefix=st.floats(0, 1e-7),
    pair=st.floats(0, 1e-9),
    tail=st.floats(0, 0.05),
)


def test_published_points():
    for tokens, seconds in ((4096, 0.070), (16_384, 0.200), (65_536, 0.730)):
        assert PUBLISHED.step([Chunk(tokens, 0)]) == pytest.approx(seconds, rel=0.025)


@given(costs, st.floats(1e-4, 2.0), st.integers(0, 1_000_000))
def test_fitting_is_the_inverse(cost, seconds, computed):
    q = cost.fitting(seconds, computed)
    if q == 0:
        assert cost.prefix * computed >= seconds
    else:
        taken = cost.token * q + cost.prefix * computed + cost.pair * q * (computed + q / 2)
        assert taken == pytest.approx(seconds, rel=1e-6)


@given(costs, st.floats(0, 2.0), st.integers(0, 1_000_000), st.integers(0, 300_000), st.integers(0, 300_000))
def test_largest_chunk(cost, seconds, computed, remaining, most):
    q = cost.largest(seconds, computed, remaining, most)
    assert 0 <= q <= min(remaining, most)
    final = q == remaining
    if q:
        assert cost.chunk(Chunk(q, computed, final)) <= seconds
        assert final or (computed + q) % BLOCK == 0
        assert final or remaining - q >= BLOCK or remaining < BLOCK
    if not final:  # nothing larger would do
        larger = (computed + q) // BLOCK * BLOCK + BLOCK - computed
        allowed = larger <= min(remaining, most) and remaining - larger >= BLOCK
        assert not allowed or cost.chunk(Chunk(larger, computed)) > seconds * (1 - 1e-9)


def test_last_chunk_is_not_a_stub():
    cost = PrefillCost(0, 1e-3)
    assert cost.largest(0.300, 0, 300, None) == 300
    assert cost.largest(0.2999, 0, 300) == 128  # 256 would leave 44
    assert cost.largest(0.2999, 0, 384) == 256
    assert cost.largest(0.127, 0, 1000) == 0


def test_free_prefill_takes_all():
    assert PrefillCost(0, 0).largest(1.0, 0, 12_345) == 12_345


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_constants(bad):
    with pytest.raises(ValueError, match="token"):
        PrefillCost(0.0, bad)


def _steps(cost, count, seed, noise):
    rng = random.Random(seed)
    for _ in range(count):
        chunks = [
            Chunk(int(2 ** rng.uniform(7, 16)), rng.choice((0, int(2 ** rng.uniform(7, 20)))), rng.random() < 0.5)
            for _ in range(rng.randint(1, 4))
        ]
        yield chunks, cost.step(chunks) * (1 + rng.gauss(0, noise))


TRUE = PrefillCost(5e-3, 12e-6, 2e-9, 0.02e-9, 4e-3)


def test_fit_recovers_constants_within_the_noise():
    fit = CostFit(PUBLISHED, forget=1.0)
    for chunks, seconds in _steps(TRUE, 600, 3, 0.03):
        fit.note(chunks, seconds)
    assert fit.cost.token == pytest.approx(TRUE.token, rel=0.05)
    assert fit.cost.pair == pytest.approx(TRUE.pair, rel=0.15)
    assert fit.mape < 0.035
    errors = [abs(fit.cost.step(c) - s) / s for c, s in _steps(TRUE, 200, 4, 0.0)]
    assert sum(errors) / len(errors) < 0.02


def test_fit_ignores_warm_up_and_stalls_but_believes_a_change():
    fit = CostFit(PUBLISHED, warm_up=2, believe=4)
    steps = list(_steps(TRUE, 300, 5, 0.01))
    for chunks, seconds in steps[:2]:
        fit.note(chunks, 33 * seconds)
    for i, (chunks, seconds) in enumerate(steps[2:200]):
        fit.note(chunks, seconds * (20 if i > 50 and i % 10 == 0 else 1))
    assert fit.rejected > 10
    assert fit.cost.token == pytest.approx(TRUE.token, rel=0.05)
    for chunks, seconds in steps[200:]:
        fit.note(chunks, 5 * seconds)
    assert fit.cost.token == pytest.approx(5 * TRUE.token, rel=0.1)


def test_fit_takes_no_nonsense():
    fit = CostFit(PUBLISHED, warm_up=0)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        fit.note([Chunk(128, 0)], seconds)
    fit.note([], 1.0)
    assert fit.samples == 0 and math.isnan(fit.mape) and fit.cost == PUBLISHED


def test_fit_of_one_shape_still_predicts_it():
    fit = CostFit(PUBLISHED, warm_up=0)
    for _ in range(100):
        fit.note([Chunk(4096, 0)], 0.05)
    assert fit.cost.step([Chunk(4096, 0)]) == pytest.approx(0.05, rel=1e-3)
