"""Rotary embedding: frequencies with and without YaRN, angles rounded to float32, rotation of adjacent pairs."""

from __future__ import annotations

import math

import numpy as np

from .config import Config


def frequencies(dim: int, base: float, yarn: Config | None = None) -> np.ndarray:
    """float32[dim / 2], computed in float64 and rounded once (docs/model.md, Rotary angles)."""
    plain = np.array([base ** (-2 * i / dim) for i in range(dim // 2)])
    if yarn is None:
        return plain.astype(np.float32)

    def corrected(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(corrected(yarn.beta_fast)), 0)
    high = min(math.ceil(corrected(yarn.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (plain / yarn.rope_factor * ramp + plain * (1 - ramp)).astype(np.float32)


class Rope:
    """Both tables of a model: layers without compressed rows use the short base, all others the long one with YaRN."""

    def __init__(self, config: Config):
        dim = config.qk_rope_head_dim
        self.plain = frequencies(dim, config.rope_theta)
        self.compressed = frequencies(dim, config.compress_rope_theta, config)

    def of_layer(self, ratio: int) -> np.ndarray:
        return self.plain if ratio == 0 else self.compressed


def rotate(x: np.ndarray, positions: np.ndarray, freqs: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Rotates adjacent pairs of the last 2 * len(freqs) dims of x [T, ..., D]; `positions` [T].

    The angle is the float32 product of position and frequency; its cosine and sine are taken in float64.
    """
    angle = (positions.astype(np.float32)[:, None] * freqs[None, :]).astype(np.float64)
    middle = (1,) * (x.ndim - 2)
    cos = np.cos(angle).reshape(len(positions), *middle, len(freqs)).astype(x.dtype)
    sin = np.sin(angle).reshape(len(positions), *middle, len(freqs)).astype(x.dtype) * (-1 if inverse else 1)
    cut = x.shape[-1] - 2 * len(freqs)
    even, odd = x[..., cut::2], x[..., cut + 1 :: 2]
    out = x.copy()
    out[..., cut::2] = even * cos - odd * sin
    out[..., cut + 1 :: 2] = even * sin + odd * cos
    return out
