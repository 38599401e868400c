"""Index scores, top-k and candidate blocks (docs/model.md, Indexer and Candidate blocks)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attention import QUERY_BLOCK
from .config import Config
from .rope import rotate
from .weights import Weights


@dataclass(frozen=True)
class Scoring:
    """What one index source scores: columns beyond a query's `visible` count, or outside its pool, are -inf."""

    raw_query: np.ndarray  # [T, Hi, Di] before the round trip through its format
    query: np.ndarray  # [T, Hi, Di] as used
    head_weights: np.ndarray  # [T, Hi]
    keys: np.ndarray  # [G, Di] as used
    visible: np.ndarray  # int64[T]
    scores: np.ndarray  # [T, G]


def queries(
    config: Config,
    weights: Weights,
    layer: int,
    x: np.ndarray,
    c_q: np.ndarray,
    positions: np.ndarray,
    freqs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Unquantised index queries [T, Hi, Di] and head weights [T, Hi] with both scale factors folded in."""
    prefix = f"layers.{layer}.attn.indexer"
    heads, dim = config.index_n_heads, config.index_head_dim
    q = (c_q @ weights.matrix(f"{prefix}.wq_b").T).reshape(len(x), heads, dim)
    w = x @ weights.matrix(f"{prefix}.weights_proj").T / np.sqrt(np.array(dim * heads, x.dtype))
    return rotate(q, positions, freqs), w


def dense_scores(q: np.ndarray, head_weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """score[t, j] = sum over heads of w * relu(q . k_j), [T, G]."""
    out = np.empty((len(q), len(keys)), q.dtype)
    for first in range(0, len(q), QUERY_BLOCK):
        part = slice(first, first + QUERY_BLOCK)
        dots = np.einsum("thd,kd->thk", q[part], keys, optimize=True)
        out[part] = np.einsum("th,thk->tk", head_weights[part], np.maximum(dots, 0))
    return out


def mask_scores(scores: np.ndarray, visible: np.ndarray, pool: np.ndarray | None, block: int) -> np.ndarray:
    """-inf beyond `visible` and, where a pool of block ids int[T, C] is given, outside of its blocks."""
    column = np.arange(scores.shape[1])
    allowed = column[None, :] < visible[:, None]
    if pool is not None:
        in_pool = np.zeros((len(scores), -(-scores.shape[1] // block) + 1), bool)  # the last column takes the fill
        np.put_along_axis(in_pool, pool, True, axis=1)
        allowed &= in_pool[:, column // block]
    return np.where(allowed, scores, -np.inf)


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Ascending ids int64[T, k] of the best finite or +inf scores, -1 fills; equal scores go to the lower id."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    kept = np.take_along_axis(scores, order, axis=-1) > -np.inf
    ids = np.sort(np.where(kept, order, scores.shape[1]), axis=-1)
    out = np.full((len(scores), k), -1, np.int64)
    out[:, : ids.shape[1]] = np.where(ids < scores.shape[1], ids, -1)
    return out


def block_scores(scores: np.ndarray, visible: np.ndarray, block: int) -> np.ndarray:
    """[T, blocks]: the best visible score of each block; the block of the newest visible row is always taken."""
    blocks = -(-scores.shape[1] // block)
    padded = np.full((len(scores), blocks * block), -np.inf, scores.dtype)
    padded[:, : scores.shape[1]] = scores
    out = padded.reshape(len(scores), blocks, block).max(-1)
    rows = np.nonzero(visible > 0)[0]
    out[rows, (visible[rows] - 1) // block] = np.inf
    return out
