"""Latent attention over two key sources with one softmax, and its projections (docs/model.md, Attention)."""

from __future__ import annotations

import numpy as np

from .config import Config
from .mhc import rms_norm
from .rope import rotate
from .weights import Weights

QUERY_BLOCK = 128  # queries scored at once; bounds the memory of a dense score matrix


def query(
    config: Config, weights: Weights, prefix: str, x: np.ndarray, positions: np.ndarray, freqs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Low-rank query c_q [T, q_lora] (also the indexer's input) and the rotated heads [T, H, D]; heads have no norm."""
    c_q = rms_norm(
        x @ weights.matrix(f"{prefix}.wq_a").T, weights.plain(f"{prefix}.q_norm.weight"), config.rms_norm_eps
    )
    heads = (c_q @ weights.matrix(f"{prefix}.wq_b").T).reshape(len(x), config.num_attention_heads, config.head_dim)
    return c_q, rotate(heads, positions, freqs)


def window_values(
    config: Config, weights: Weights, prefix: str, x: np.ndarray, positions: np.ndarray, freqs: np.ndarray
) -> np.ndarray:
    """This layer's own latent [T, D], key and value in one, before it is quantised."""
    kv = rms_norm(x @ weights.matrix(f"{prefix}.wkv").T, weights.plain(f"{prefix}.kv_norm.weight"), config.rms_norm_eps)
    return rotate(kv, positions, freqs)


def attend(
    q: np.ndarray,
    positions: np.ndarray,
    window_keys: np.ndarray,
    window_positions: np.ndarray,
    window: int,
    main_keys: np.ndarray,
    selected: np.ndarray,
    sink: np.ndarray,
) -> np.ndarray:
    """Output [T, H, D] of queries q [T, H, D].

    window_keys [Tw, D] holds every window row that may be read: a lower bound of a replay or of a decoder tail is
    expressed by leaving earlier rows out. selected int[T, K] names rows of main_keys [G, D], -1 fills. The same token
    may be seen through both sources. The sink joins the denominator only.
    """
    out = np.empty_like(q)
    keys = np.concatenate([window_keys, main_keys])
    for first in range(0, len(q), QUERY_BLOCK):
        part = slice(first, first + QUERY_BLOCK)
        age = positions[part, None] - window_positions[None, :]
        chosen = np.zeros((len(age), len(main_keys) + 1), bool)  # the last column takes the fill
        np.put_along_axis(chosen, selected[part], True, axis=1)
        mask = np.concatenate([(age >= 0) & (age < window), chosen[:, :-1]], axis=1)
        scores = np.einsum("thd,kd->htk", q[part], keys, optimize=True) / np.sqrt(np.array(q.shape[-1], q.dtype))
        scores = np.where(mask, scores, -np.inf)
        top = np.maximum(scores.max(-1, initial=-np.inf), sink[:, None])
        weight = np.exp(scores - top[..., None])
        total = weight.sum(-1) + np.exp(sink[:, None] - top)
        out[part] = np.einsum("htk,kd->thd", weight / total[..., None], keys, optimize=True)
    return out


def output(
    config: Config, weights: Weights, prefix: str, heads: np.ndarray, positions: np.ndarray, freqs: np.ndarray
) -> np.ndarray:
    """y [T, d]: heads carry their values' rotation, are rotated back at the query and projected group by group."""
    groups = config.o_groups
    grouped = rotate(heads, positions, freqs, inverse=True).reshape(len(heads), groups, -1)
    wo_a = weights.matrix(f"{prefix}.wo_a").reshape(groups, -1, grouped.shape[-1])
    z = np.einsum("tgi,goi->tgo", grouped, wo_a, optimize=True).reshape(len(heads), -1)
    return z @ weights.matrix(f"{prefix}.wo_b").T
