"""Router and experts (docs/model.md, Mixture of experts)."""

from __future__ import annotations

import numpy as np

from .mhc import sigmoid
from .weights import Weights


def router_scores(weights: Weights, prefix: str, x: np.ndarray, is_image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores [T, E] and biased scores [T, E]; positions of an image span use their own selection bias.

    The bias takes part in the choice only, never in the weights.
    """
    logits = x @ weights.matrix(f"{prefix}.gate").T
    scores = np.sqrt(np.logaddexp(0, logits)).astype(x.dtype)  # sqrt(softplus)
    bias, bias_vl = weights.plain(f"{prefix}.gate.bias"), weights.plain(f"{prefix}.gate.bias_vl")
    return scores, scores + np.where(is_image[:, None], bias_vl, bias)


def choose(biased: np.ndarray, k: int) -> np.ndarray:
    """Expert ids int64[T, k] in order of falling biased score; equal scores go to the lower id."""
    return np.argsort(-biased, axis=-1, kind="stable")[:, :k]


def gate_weights(scores: np.ndarray, ids: np.ndarray, routed_scale: float) -> np.ndarray:
    """Weights [T, k] of the chosen experts: their unbiased scores, normalised and scaled."""
    chosen = np.take_along_axis(scores, ids, axis=-1)
    return chosen / (chosen.sum(-1, keepdims=True) + 1e-20) * routed_scale


def expert(weights: Weights, prefix: str, x: np.ndarray, weight: np.ndarray, limit: float) -> np.ndarray:
    """One expert on x [T, d] with a weight [T] that is applied before the down projection.

    Only the gate half is clamped on one side; the up half is clamped on both.
    """
    gate = np.minimum(x @ weights.matrix(f"{prefix}.w1").T, limit)
    up = np.clip(x @ weights.matrix(f"{prefix}.w3").T, -limit, limit)
    return (gate * sigmoid(gate) * up * weight[:, None]) @ weights.matrix(f"{prefix}.w2").T


def mixture(
    weights: Weights, prefix: str, x: np.ndarray, ids: np.ndarray, gates: np.ndarray, limit: float
) -> np.ndarray:
    """Sum of the chosen experts and the shared one [T, d]."""
    y = expert(weights, f"{prefix}.shared_experts", x, np.ones(len(x), x.dtype), limit)
    for e in np.unique(ids):
        row, slot = np.nonzero(ids == e)
        y[row] += expert(weights, f"{prefix}.experts.{e}", x[row], gates[row, slot], limit)
    return y
