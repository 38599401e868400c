"""Judging one discrete choice against float64 values: would a small error of the values explain it?

Each judge returns, for every item, the error that explains the choice divided by the error allowed: 0 where the choice
is the oracle's own, at most 1 where it is right within tolerance, above 1 (or infinite) where it is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .formats import E4M3, INDEX, Format, decode_signed
from .indexer import Scoring


@dataclass(frozen=True)
class Tolerances:
    """Errors that float32 arithmetic may leave, relative to the largest magnitude of the row they stand in.

    A float32 twin of the oracle stays below a third of them on random models of 12 to 16 layers. Selections may come
    close to 1 all the same, where an index query was rounded to the other side: the bound is exact there.
    """

    row: float = 2e-5  # cache values, index queries and index head weights, before rounding to a format
    product: float = 2e-6  # an index product of rounded operands, relative to the sum of its magnitudes
    router: float = 2e-5  # biased router scores, relative to the larger of 1 and the largest score


def _distance(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.maximum(np.maximum(low - value, value - high), 0)


def _amax_range(form: Format, byte: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitudes of a group that give a scale byte; (inf, inf) where none does."""
    if form.name == "main":
        middle = np.concatenate([[0.0], (E4M3[1:] + E4M3[:-1]) / 2 * 6, [np.inf]])
        low, high, smallest, largest = middle[np.minimum(byte, 126)], middle[np.minimum(byte, 126) + 1], 1, 126
    else:
        top = 6.0 if form is INDEX else 448.0
        high = top * np.ldexp(1.0, byte - 127)
        low, smallest, largest = high / 2, int(form.scale_byte(np.zeros(()))), 254
    low = np.where(byte == smallest, 0.0, low)
    impossible = (byte < smallest) | (byte > largest)
    return np.where(impossible, np.inf, low), np.where(impossible, np.inf, high)


def rows(form: Format, theirs: np.ndarray, values: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Ratios of codes [T, D] and of scale bytes [T, groups] of stored rows against float64 values [T, D].

    Codes are judged under the implementation's scale; the sign of a zero is free.
    """
    allowed = tolerance * np.abs(values).max(-1, keepdims=True) + 1e-30
    codes, scale = form.split(theirs)
    amax = np.abs(values).reshape(*scale.shape, form.group).max(-1)
    low, high = _amax_range(form, scale)
    with np.errstate(invalid="ignore"):
        scale_ratio = _distance(amax, low, high) / allowed
    unit = np.repeat(form.scale_value(scale), form.group, axis=-1)
    magnitude = codes % form.sign_bit
    middle = np.concatenate([[0.0], (form.table[1:] + form.table[:-1]) / 2, [np.inf]])
    known = magnitude < len(form.table)
    magnitude = np.where(known, magnitude, 0)
    low, high = middle[magnitude], middle[magnitude + 1]
    low, high = np.where(magnitude == 0, -high, low), high
    signed = np.where(codes >= form.sign_bit, -values, values)
    with np.errstate(invalid="ignore"):
        needed = _distance(signed, low * unit, high * unit)
    return np.where(known & np.isfinite(unit), needed / allowed, np.inf), np.nan_to_num(scale_ratio, nan=np.inf)


def same_codes(form: Format, theirs: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Where codes [T, D] agree, the sign of zero aside."""
    a, b = (decode_signed(form.table, form.split(r)[0]) for r in (theirs, own))
    return a == b


def well_formed(theirs: np.ndarray, count: int, scores: np.ndarray) -> bool:
    """Whether ids, without fills, are ascending, free of repeats, `count` many and allowed (scores [G] above -inf)."""
    if len(theirs) != count or np.any(np.diff(theirs) <= 0):
        return False
    return count == 0 or bool(theirs[0] >= 0 and theirs[-1] < len(scores) and np.all(scores[theirs] > -np.inf))


def selection(theirs: np.ndarray, own: np.ndarray, scores: np.ndarray, radius: np.ndarray) -> float:
    """Ratio of one query's well-formed choice against its own, with scores [G] and their errors [G].

    Of two exactly equal scores that no error can part, the lower id must be taken.
    """
    left_out, taken = np.setdiff1d(own, theirs), np.setdiff1d(theirs, own)
    if len(taken) == 0:
        return 0.0
    gap = scores[left_out][:, None] - scores[taken][None, :]
    room = radius[left_out][:, None] + radius[taken][None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(room > 0, gap / room, np.inf)
    return float(ratio.max())


def query_bounds(raw: np.ndarray, error: np.ndarray, quantised: bool) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest value that an index query [..., Di] known to within `error` can have as used.

    Queries are not exported. Where one stands near a rounding boundary of its format, either side is possible.
    """
    if not quantised:
        return raw - error, raw + error
    grouped = raw.reshape(*raw.shape[:-1], -1, INDEX.group)
    error = np.broadcast_to(error[..., None], (*grouped.shape[:-1], 1))
    amax = np.abs(grouped).max(-1)
    found = []
    for shift in (-1, 1):
        byte = INDEX.scale_byte(np.maximum(amax + shift * error[..., 0], 0))
        scale = INDEX.scale_value(byte)[..., None]
        sides = [INDEX.codes(grouped + side * error, byte) for side in (-1, 1)]
        found += [decode_signed(INDEX.table, codes) * scale for codes in sides]
    return np.min(found, 0).reshape(raw.shape), np.max(found, 0).reshape(raw.shape)


def score_radius(scoring: Scoring, row: int, tolerances: Tolerances, quantised: bool) -> np.ndarray:
    """Error [G] that one query's index scores may have; exactly 0 where every head's product is surely negative."""
    raw, keys, weight = scoring.raw_query[row], scoring.keys, scoring.head_weights[row]
    error = tolerances.row * np.abs(raw).max(-1, keepdims=True)
    low, high = query_bounds(raw, error, quantised)
    size = np.abs(keys)
    centre = scoring.query[row] @ keys.T
    # The used query lies between the bounds but not always in their middle: take the larger side.
    spread = np.maximum(high - scoring.query[row], scoring.query[row] - low) @ size.T
    spread = spread + tolerances.product * (np.abs(scoring.query[row]) @ size.T)
    upper, lower = np.maximum(centre + spread, 0), np.maximum(centre - spread, 0)
    own = np.maximum(centre, 0)
    reach = np.maximum(upper - own, own - lower)
    weight_error = tolerances.row * np.abs(weight).max()
    return (np.abs(weight) + weight_error) @ reach + np.sum(weight_error * own, 0)
