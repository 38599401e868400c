"""Global rows of the source layers: latents, their main rows and index keys (docs/model.md, Compressor)."""

from __future__ import annotations

import numpy as np

from .config import Config
from .mhc import rms_norm
from .rope import rotate
from .weights import Weights


def pool(kv: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """[G, D] of the members' kv and gate [G, ratio, D]: a softmax over the members, channel by channel."""
    weight = np.exp(gate - gate.max(1, keepdims=True))
    return (weight / weight.sum(1, keepdims=True) * kv).sum(1)


def project(config: Config, weights: Weights, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """kv and gate of single tokens, each [..., D]; at ratio 1 there is no gate and zeros stand for it."""
    prefix = f"layers.{layer}.attn.compressor"
    kv = x @ weights.matrix(f"{prefix}.wkv").T
    if config.compress_ratios[layer] == 1:
        return kv, np.zeros_like(kv)
    return kv, x @ weights.matrix(f"{prefix}.wgate").T


def rows_of_groups(
    config: Config,
    weights: Weights,
    layer: int,
    kv: np.ndarray,
    gate: np.ndarray,
    groups: np.ndarray,
    freqs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Main values [G, D] and index keys [G, Di], unquantised, of `groups` with members kv and gate [G, ratio, D].

    Both are rotated at the group's first token; the index key is made of the latent before that rotation.
    """
    prefix, eps = f"layers.{layer}.attn", config.rms_norm_eps
    positions = groups * config.compress_ratios[layer]
    latent = rms_norm(pool(kv, gate), weights.plain(f"{prefix}.compressor.norm.weight"), eps)
    key = latent @ weights.matrix(f"{prefix}.indexer.wk").T
    key = rms_norm(key, weights.plain(f"{prefix}.indexer.k_norm.weight"), eps)
    return rotate(latent, positions, freqs), rotate(key, positions, freqs)
