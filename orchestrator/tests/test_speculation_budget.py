"""How many drafts are worth their time: the search, the cost curve, its correction, and how it is kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.balance.cost_curve import Correction, CostCurve
from orchestrator.balance.speculation import Budget, Rest, survivals
from orchestrator.engine import curve_cache
from orchestrator.engine.cost_profile import _rising
from orchestrator.engine.step_inputs import sizes

JAGGED = CostCurve((1, 2, 3), (1.0, 2.0, 1 / 0.45))  # steps a second: 1, 0.5, 0.45


def test_the_search_does_not_stop_at_the_first_loss():
    assert Budget(JAGGED).total(1, [(0.8, 0.9)]) == 2  # 1.0, 0.9, 1.134 tokens a second
    assert Budget(JAGGED).total(1, [(0.8, 0.0)]) == 0
    assert Budget(JAGGED).total(1, [(0.8, 0.9)], most=1) == 0


def test_without_a_curve_everything_is_verified():
    assert Budget().total(3, [(0.0, 0.0), (0.1,)]) == 3


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=8),
    st.lists(st.floats(0.01, 1), min_size=48, max_size=48),
)
@settings(max_examples=80, deadline=None)
def test_the_total_is_the_best_of_all(confidences, increments):
    seconds = [sum(increments[: i + 1]) for i in range(48)]
    budget = Budget(CostCurve(tuple(range(1, 49)), tuple(seconds)))
    requests = len(confidences)
    chances = sorted((a for row in confidences for a in survivals(row)), reverse=True)
    rates = [(requests + sum(chances[:k])) / seconds[requests + k - 1] for k in range(len(chances) + 1)]
    chosen = budget.total(requests, confidences)
    assert rates[chosen] == pytest.approx(max(rates))
    assert all(rate < rates[chosen] or rate == pytest.approx(rates[chosen]) for rate in rates[:chosen])


def test_drafting_rests_where_it_does_not_pay():
    dear = Budget(CostCurve((1, 6), (1.0, 9.0), draft_requests=(1,), draft_seconds=(0.5,)))
    assert dear.total(1, [(0.1,)]) == 0 and not dear.pays
    cheap = Budget(CostCurve((1, 6), (1.0, 1.1), draft_requests=(1,), draft_seconds=(0.1,)))
    assert cheap.total(1, [(0.9, 0.9)]) == 2 and cheap.pays
    rest = Rest(patience=3, length=4)
    assert [rest.drafts(False) for _ in range(10)] == [True, True, False, False, False, False, True, True, True, False]
    assert all(Rest().drafts(pays) for pays in (True, False, False, True) * 9)


def test_survival_takes_what_it_cannot_use_as_zero():
    assert survivals((0.5, 2.0, float("nan"), 0.9)) == [0.5, 0.5, 0.0, 0.0]
    assert survivals((-1.0, 1.0)) == [0.0, 0.0]


def test_reading_a_curve():
    ramp = CostCurve((2, 4, 8), (1.0, 3.0, 5.0), draft_requests=(1, 4), draft_seconds=(0.1, 0.4))
    assert [ramp.step(n) for n in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert ramp.draft(2) == pytest.approx(0.2) and JAGGED.draft(2) == 0.0
    stairs = CostCurve((2, 4, 8), (1.0, 3.0, 5.0), staircase=True)
    assert [stairs.step(n) for n in (1, 2, 3, 4, 5, 8, 10)] == [1.0, 1.0, 3.0, 3.0, 5.0, 5.0, 6.0]
    assert CostCurve((4,), (2.0,)).step(8) == 4.0 and CostCurve((4,), (2.0,)).step(1) == 2.0
    for rows, seconds in (((), ()), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1,), (0.0,))):
        with pytest.raises(ValueError, match="rows"):
            CostCurve(rows, seconds)


def test_a_longer_context_is_learnt_as_a_slope():
    correction = Correction(CostCurve((4, 8), (1.0, 2.0)))
    for _ in range(40):
        correction.note(4, 1.4)
        correction.note(8, 2.8)
    assert correction.slope == pytest.approx(0.1)
    for _ in range(9):
        correction.note(6, 99.0)  # fewer than ten steps of a size say nothing
    assert correction.slope == pytest.approx(0.1)
    quick = Correction(CostCurve((4,), (1.0,)))
    for _ in range(40):
        quick.note(4, 0.5)
    assert quick.slope == 0.0  # never below the curve


def test_a_correction_changes_the_choice():
    budget = Budget(CostCurve((1, 6), (1.0, 1.3)))
    likely = [(0.5, 0.5, 0.5, 0.5, 0.5)]
    before = budget.total(1, likely)
    for _ in range(40):
        budget.note(1, 1, 1.6, 0.0)
        budget.note(1, 6, 4.9, 0.0)
    assert before == 3 > budget.total(1, likely)


def test_time_beside_the_forward_pass_counts():
    budget = Budget(CostCurve((1, 2), (1.0, 1.7)))
    assert budget.total(1, [(0.5,)]) == 0
    for _ in range(5):
        budget.note(1, 1, 1.0, 2.0)
    assert budget.other_seconds(1) == 2.0 == budget.other_seconds(7)
    assert budget.total(1, [(0.5,)]) == 1  # 1 / 3.0 against 1.5 / 3.7


def test_a_kept_curve_is_valid_for_a_while(tmp_path):
    path = tmp_path / "curves" / "a.json"
    curve = CostCurve((1, 2), (0.5, 0.75), True, (1,), (0.1,))
    assert curve_cache.load(path) is None
    curve_cache.save(path, curve)
    assert curve_cache.load(path) == curve
    assert curve_cache.load(path, max_age=-1.0) is None
    good = path.read_text()
    damaged = json.loads(good)
    damaged["curve"]["seconds"] = [1.0]
    for text in ("", "{}", "[]", good.replace('"version": 2', '"version": 0'), json.dumps(damaged)):
        path.write_text(text)
        assert curve_cache.load(path) is None, text
    with pytest.raises(ValueError, match="curve: got"):
        curve_cache.curve_from({"rows": [1], "other": []})


def test_profiled_sizes_and_noise():
    assert sizes(96) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96] and sizes(1) == [1]
    assert sizes(6) == [1, 2, 3, 4, 6] and sizes(6 * 64)[-2:] == [256, 384]
    assert _rising([1.0, 3.0, 2.0, 4.0]) == (1.0, 2.5, 2.5, 4.0)
