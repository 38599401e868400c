"""Hyper-connections: coefficients of the residual streams and their update (docs/model.md, Hyper-connections)."""

from __future__ import annotations

import numpy as np

from .config import Config
from .weights import Weights


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def coefficients(
    config: Config, weights: Weights, prefix: str, streams: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """pre [T, n], post [T, n], comb [T, source, destination] of streams [T, n, d].

    `prefix` is e.g. `layers.3.hc_attn`. Rows of fn: n of pre, n of post, n * n of comb.
    """
    n = config.hc_mult
    fn, base, scale = (weights.plain(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
    flat = streams.reshape(len(streams), -1)
    mixed = flat @ fn.T / np.sqrt(np.mean(flat * flat, axis=-1, keepdims=True) + config.rms_norm_eps)

    pre = sigmoid(mixed[:, :n] * scale[0] + base[:n]) + config.hc_eps
    post = 2 * sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixed[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    comb = np.exp(logits - logits.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + config.hc_eps
    comb = comb / (comb.sum(-2, keepdims=True) + config.hc_eps)
    for _ in range(config.hc_sinkhorn_iters - 1):  # alternate rows and columns, ending on columns
        comb = comb / (comb.sum(-1, keepdims=True) + config.hc_eps)
        comb = comb / (comb.sum(-2, keepdims=True) + config.hc_eps)
    return pre, post, comb


def mix(streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
    """Input of a sublayer [T, d] before its norm; `pre` comes from the sublayer before."""
    return np.einsum("tj,tjd->td", pre, streams)


def update(streams: np.ndarray, y: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
    """New streams: each destination gets its share of y and of every source stream."""
    return post[:, :, None] * y[:, None, :] + np.einsum("tij,tid->tjd", comb, streams)
