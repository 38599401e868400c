"""Whether the drafter's confidence says how often drafts stand, and temperatures that make it so.

c_k is the predicted chance that draft k is kept if those before it were, and a_k = c_1 ... c_k that it is kept at all:
the survival that a scheduler ranks drafts by. Temperatures are fitted from left to right on a_k, so that what earlier
places got wrong is not made up for by later ones twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel_core.check import require
from orchestrator.evaluate.speculate import Trial

BINS = 10
LOWEST, HIGHEST = 0.125, 8.0
_GRID = 49
_ROUNDS = 4
_LIMIT = 60.0
_RESAMPLES = 100


@dataclass(frozen=True)
class Bin:
    """Cases whose prediction fell into one bin: how many, their mean prediction, the share that came true."""

    count: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Reliability:
    """Predicted against observed survival of one place (0 the first), or of all (place None).

    `ece` is the expected calibration error, `stderr` its standard error by bootstrap over verifications.
    """

    place: int | None
    count: int
    ece: float
    stderr: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Calibration:
    """Reliability on data that the temperatures were not fitted on: without any, with them, with those of the model."""

    temperatures: tuple[float, ...]
    fitted_on: int
    before: tuple[Reliability, ...]
    after: tuple[Reliability, ...]
    stored: tuple[Reliability, ...]


def survival(logits: np.ndarray, temperatures: Sequence[float] | None = None) -> np.ndarray:
    """a [N, δ] of confidence logits [N, δ], each place divided by its temperature."""
    scale = np.ones(logits.shape[1]) if temperatures is None else np.asarray(temperatures, float)
    scaled = np.clip(logits / scale, -_LIMIT, _LIMIT)
    return np.cumprod(1 / (1 + np.exp(-scaled)), axis=1)


def bins_of(predicted: np.ndarray, observed: np.ndarray) -> tuple[Bin, ...]:
    """Bins of equal width over predictions [N] in 0..1 with outcomes [N] in {0, 1}; empty ones are left out."""
    require(len(predicted) == len(observed) > 0, "predicted", f"{len(predicted)} cases", "one or more, as observed")
    which = np.minimum((predicted * BINS).astype(int), BINS - 1)
    count, total, hits = (
        np.bincount(which, weights, minlength=BINS) for weights in (None, predicted, observed.astype(float))
    )
    return tuple(Bin(int(n), float(p / n), float(o / n)) for n, p, o in zip(count, total, hits, strict=True) if n)


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Mean over cases of |mean prediction - share that came true| of their bin."""
    bins = bins_of(predicted, observed)
    return sum(b.count * abs(b.predicted - b.observed) for b in bins) / len(predicted)


def reliabilities(predicted: np.ndarray, accepted: np.ndarray) -> tuple[Reliability, ...]:
    """One a place of [N, δ], then one over all places together. NaN outcomes (never offered) are left out."""
    places = [k for k in range(predicted.shape[1]) if not np.isnan(accepted[:, k]).all()]
    single = [_reliability(predicted[:, k : k + 1], accepted[:, k : k + 1], k) for k in places]
    return (*single, _reliability(predicted, accepted, None))


def _reliability(predicted: np.ndarray, accepted: np.ndarray, place: int | None) -> Reliability:
    def error(rows: np.ndarray | slice) -> float:
        known = ~np.isnan(accepted[rows])
        return calibration_error(predicted[rows][known], accepted[rows][known])

    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(predicted), (_RESAMPLES, len(predicted)))
    draws = [d for d in picks if not np.isnan(accepted[d]).all()]
    known = ~np.isnan(accepted)
    return Reliability(
        place,
        int(known.sum()),
        error(slice(None)),
        float(np.std([error(d) for d in draws], ddof=1)) if len(draws) > 1 else float("nan"),
        bins_of(predicted[known], accepted[known]),
    )


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> tuple[float, ...]:
    """Temperatures [δ] between 0.125 and 8 that minimise the calibration error of the survival, left to right.

    Args:
        logits: [N, δ] confidence logits.
        accepted: [N, δ], 1 where the draft and all before it were kept, 0 where not, NaN where it was not offered.

    Raises:
        ValueError: shapes that differ, no cases, or outcomes that are no prefixes.
    """
    logits, accepted = np.asarray(logits, float), np.asarray(accepted, float)
    require(logits.ndim == 2 and logits.shape[0] > 0, "logits", list(logits.shape), "[N, places] with N of 1 or more")
    require(logits.shape == accepted.shape, "accepted", list(accepted.shape), list(logits.shape))  # type: ignore[arg-type]
    require(
        not (np.diff(accepted, axis=1) > 0).any(), "accepted", "1 after 0", "prefixes: 1 only where all before are 1"
    )
    temperatures: list[float] = []
    for k in range(logits.shape[1]):
        known = ~np.isnan(accepted[:, k])
        if not known.any():
            temperatures.append(1.0)
            continue
        before = survival(logits[known, :k], temperatures)[:, -1] if k else np.ones(known.sum())
        temperatures.append(_search(before, logits[known, k], accepted[known, k]))
    return tuple(temperatures)


def calibrate(trials: Sequence[Trial]) -> Calibration | None:
    """Fit on the verifications of every second request and report on the others; None without both."""
    fit, held = ([t for t in trials if t.request % 2 == half] for half in (0, 1))
    if not fit or not held:
        return None
    temperatures = fit_temperatures(*observations(fit))
    logits, accepted = observations(held)
    stored = np.cumprod(np.array([t.confidence for t in held]), axis=1)
    return Calibration(
        temperatures,
        len(fit),
        reliabilities(survival(logits), accepted),
        reliabilities(survival(logits, temperatures), accepted),
        reliabilities(stored, accepted),
    )


def observations(trials: Sequence[Trial]) -> tuple[np.ndarray, np.ndarray]:
    """Confidence logits [N, δ] and survival outcomes [N, δ], NaN behind an end token."""
    logits = np.array([t.confidence_logits for t in trials])
    place = np.arange(logits.shape[1])
    kept, offered = (np.array([getattr(t, name) for t in trials])[:, None] for name in ("kept", "offered"))
    return logits, np.where(place < offered, (place < kept).astype(float), np.nan)


def _search(before: np.ndarray, logits: np.ndarray, accepted: np.ndarray) -> float:
    """A log-spaced grid, then finer ones around its best point. Of equal errors the temperature nearest 1 wins."""

    def error(log_temperature: float) -> tuple[float, float]:
        c = 1 / (1 + np.exp(-np.clip(logits / np.exp(log_temperature), -_LIMIT, _LIMIT)))
        return round(calibration_error(before * c, accepted), 12), abs(log_temperature)

    low, high = np.log(LOWEST), np.log(HIGHEST)
    best, step = 0.0, (high - low) / (_GRID - 1)
    points = np.linspace(low, high, _GRID)
    for _ in range(_ROUNDS):
        best = min((float(p) for p in points), key=error)
        points = np.clip(np.linspace(best - step, best + step, 9), low, high)
        step /= 4
    return float(np.exp(best))
