"""Calibration error and sequential temperatures on made-up confidences of known miscalibration."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.evaluate.calibration import (
    calibrate,
    calibration_error,
    fit_temperatures,
    observations,
    reliabilities,
    survival,
)
from orchestrator.evaluate.speculate import Trial

WRONG = np.array([2.0, 0.5, 3.0, 1.0, 0.4])


def made_up(count: int, seed: int = 0, wrong: np.ndarray = WRONG) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `wrong` times too large, and prefix outcomes of the right chances."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.2, 1.0, (count, len(wrong)))
    stood = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    return true * wrong, np.cumprod(stood, axis=1).astype(float)


def test_calibration_error_of_known_bins():
    predicted = np.array([0.05] * 10 + [0.95] * 10)
    observed = np.array([0] * 5 + [1] * 5 + [1] * 9 + [0])
    assert calibration_error(predicted, observed) == pytest.approx((0.45 + 0.05) / 2)
    assert calibration_error(np.array([1.0, 0.0]), np.array([1, 0])) == 0


def test_temperatures_undo_what_was_wrong():
    temperatures = fit_temperatures(*made_up(20_000))
    assert temperatures == pytest.approx(WRONG, rel=0.15)
    logits, accepted = made_up(20_000, seed=1)
    before, after = (reliabilities(survival(logits, t), accepted)[-1] for t in (None, temperatures))
    assert before.ece > 0.03 and after.ece < 0.01
    assert after.stderr < 0.005


def test_right_confidences_keep_their_temperatures():
    assert fit_temperatures(*made_up(20_000, wrong=np.ones(3))) == pytest.approx([1, 1, 1], rel=0.1)


def test_later_places_are_fitted_on_the_whole_product():
    """A first place that no temperature can mend: the second one makes up for it as far as it can."""
    logits, accepted = made_up(20_000, wrong=np.array([1.0, 1.0]))
    logits[:, 0] = 0.5  # says the same of every draft; no temperature of it is right below a chance of 0.5
    accepted = accepted * (np.arange(len(accepted)) % 3 == 0)[:, None]
    temperatures = fit_temperatures(logits, accepted)
    errors = [
        calibration_error(survival(logits, (temperatures[0], t))[:, 1], accepted[:, 1])
        for t in np.geomspace(0.125, 8, 60)
    ]
    found = calibration_error(survival(logits, temperatures)[:, 1], accepted[:, 1])
    assert found <= min(errors) + 1e-3


def test_places_never_offered_are_left_out():
    logits, accepted = made_up(4000)
    accepted[:, 4] = np.nan
    accepted[::2, 3] = np.nan
    temperatures = fit_temperatures(logits, accepted)
    assert temperatures[4] == 1.0
    found = reliabilities(survival(logits, temperatures), accepted)
    assert [r.place for r in found] == [0, 1, 2, 3, None]
    assert found[3].count == 2000 and found[-1].count == 4000 * 3 + 2000


def test_observations_and_disjoint_halves():
    trials = [Trial(r, r % 3, 5 if r else 2, False, (1.0,) * 5, (0.7,) * 5) for r in range(40)]
    logits, accepted = observations(trials)
    assert logits.shape == (40, 5)
    assert accepted[1].tolist() == [1, 0, 0, 0, 0] and np.isnan(accepted[0]).tolist() == [False] * 2 + [True] * 3
    found = calibrate(trials)
    assert found is not None and found.fitted_on == 20 and found.before[0].count == 20
    assert found.stored[0].bins[0].predicted == pytest.approx(0.7)
    assert calibrate([t for t in trials if t.request % 2]) is None


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="accepted: got 1 after 0"):
        fit_temperatures(np.zeros((2, 2)), np.array([[0, 1], [1, 1]]))
    with pytest.raises(ValueError, match="logits"):
        fit_temperatures(np.zeros((0, 5)), np.zeros((0, 5)))
    with pytest.raises(ValueError, match="accepted"):
        fit_temperatures(np.zeros((2, 5)), np.zeros((2, 4)))
