"""Bins: shares, moves, help between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.balance.prefill import PUBLISHED, BinSettings, PrefillBins, PrefillCost, Prompt, key_function, shares

K = 1024


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.integers(0, 100))
def test_shares(demand, engines):
    given_ = shares(demand, engines)
    assert sum(given_) == engines and min(given_) >= 0
    if engines >= 2 * len(demand):
        assert all(g > 0 for g, d in zip(given_, demand, strict=True) if d > 0)
    total = sum(demand)
    for g, d in zip(given_, demand, strict=True):
        if total > 0 and engines:
            assert g <= engines * d / total + 1 or sum(demand) == 0  # largest remainders give at most one more


def test_edges_belong_to_the_longer_bin():
    bins = PrefillBins()
    assert [bins.bin_of(k) for k in (0, 16 * K - 1, 16 * K, 64 * K, 256 * K, 10**7)] == [0, 0, 1, 2, 3, 3]


def test_keys():
    prompt = Prompt(100_000, 3_000)
    assert key_function("length", PUBLISHED)(prompt) == 100_000
    assert key_function("missed", PUBLISHED)(prompt) == 3_000
    assert key_function("cost", PUBLISHED)(prompt) == pytest.approx(3_000)
    pairs = PrefillCost(0, 9e-6, 0, 0.011e-9)
    assert 3_000 < key_function("cost", pairs)(prompt) < 100_000
    with pytest.raises(ValueError, match="key"):
        key_function("words", PUBLISHED)


def _filled(engines=16, **settings):
    bins = PrefillBins(BinSettings(**settings))
    for n in range(engines):
        bins.add(f"e{n:02}")
    return bins


def test_engines_follow_demand_at_a_limited_rate():
    bins = _filled(moves=2)
    assert bins._held() == [4, 4, 4, 4]
    for _ in range(20):
        moved = bins.round([8.0, 0, 0, 0], [0, 0, 0, 0], 1.0)
        assert len(moved) <= 2
    assert bins._held() == [16, 0, 0, 0]
    bins.round([8.0, 0, 0, 4.0], [0, 0, 0, 0], 1.0)
    assert bins._held()[3] >= 1, "a bin with work has an engine after one round"


def test_no_flapping_around_a_share():
    bins = _filled()
    for _ in range(20):
        bins.round([5.0, 5.0, 5.0, 5.0], [0] * 4, 1.0)
    changes = 0
    for n in range(100):
        wave = 0.1 if n % 2 else -0.1
        changes += len(bins.round([5.0 + wave, 5.0 - wave, 5.0, 5.0], [0] * 4, 1.0))
    assert changes == 0


def test_queued_work_counts():
    bins = _filled()
    for _ in range(12):
        bins.round([0.0] * 4, [0, 0, 90.0, 10.0], 1.0)
    held = bins._held()
    assert held[2] > held[3] >= 1 and held[0] == held[1] == 0


def test_idle_engines_help_shorter_bins_first_and_longer_ones_that_wait():
    bins = PrefillBins(engines={"a": 1})
    assert bins.order("a", {}) == [1, 0]
    assert bins.order("a", {2: 0.1, 3: 0.6}) == [1, 0, 3]


def test_engines_leave():
    bins = _filled(3)
    bins.remove("e01")
    bins.remove("e01")
    assert sum(bins._held()) == 2
    assert PrefillBins().round([1.0] * 4, [0] * 4, 1.0) == {}


def test_bad_edges():
    with pytest.raises(ValueError, match="edges"):
        BinSettings(edges=(16, 16))
