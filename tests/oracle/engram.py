"""Engram: hashed n-gram look-up and its injection into the residual streams (docs/model.md, Engram)."""

from __future__ import annotations

import numpy as np

from .config import Config
from .mhc import rms_norm, sigmoid
from .weights import Weights


def is_prime(n: int) -> bool:
    return n > 1 and all(n % f for f in range(2, int(n**0.5) + 1))


def bucket_primes(config: Config) -> np.ndarray:
    """int64[layers, orders, heads]: each order of each layer searches from the bucket base; none is used twice."""
    used: set[int] = set()
    table = []
    for _ in config.engram_layer_ids:
        for _ in range(config.engram_max_ngram_size - 1):
            candidate = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                candidate += 1
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                table.append(candidate)
    return np.array(table, np.int64).reshape(len(config.engram_layer_ids), -1, config.engram_n_heads)


def multipliers(layer: int, compressed_vocab: int, n: int = 4) -> np.ndarray:
    """Odd int64[n], small enough that a mapped id times a multiplier stays below 2**63."""
    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    return 2 * np.random.default_rng(10007 * layer).integers(0, bound, n) + 1


class Hasher:
    """Table rows of every position of a sequence, from token ids alone."""

    def __init__(self, config: Config, token_map: np.ndarray | None = None):
        self.config = config
        if token_map is None:
            if config.engram_compressed_vocab_size != config.vocab_size:
                raise ValueError(
                    "token_map is needed: the compressed vocabulary has "
                    f"{config.engram_compressed_vocab_size} ids, the vocabulary {config.vocab_size}"
                )
            token_map = np.arange(config.vocab_size)
        self.token_map = np.asarray(token_map, np.int64)
        self.primes = bucket_primes(config)
        sums = self.primes.sum((1, 2))
        if tuple(sums) != tuple(config.engram_num_embeddings):
            raise ValueError(f"engram_num_embeddings is {config.engram_num_embeddings}, the primes sum to {sums}")

    def rows(self, layer: int, tokens: np.ndarray, dead: np.ndarray) -> np.ndarray:
        """int64[N, orders * heads], -1 where the position is dead. Look-back stops at the start and at the dead."""
        config = self.config
        which = config.engram_layer_ids.index(layer)
        odd = multipliers(layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size)
        pad = self.token_map[config.engram_pad_token_id]
        primes = self.primes[which]
        offsets = (np.cumsum(primes) - primes.ravel()).reshape(primes.shape)
        out = np.full((len(tokens), *primes.shape), -1, np.int64)
        for p in range(len(tokens)):
            if dead[p]:
                continue
            rolling = self.token_map[tokens[p]] * odd[0]
            blocked = False
            for shift in range(1, config.engram_max_ngram_size):
                blocked = blocked or p < shift or bool(dead[p - shift])
                token = pad if blocked else self.token_map[tokens[p - shift]]
                rolling ^= token * odd[shift]
                out[p, shift - 1] = rolling % primes[shift - 1] + offsets[shift - 1]
        return out.reshape(len(tokens), -1)


def inject(config: Config, weights: Weights, layer: int, streams: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Streams [T, n, d] with the gated value of the looked-up rows [T, orders * heads] added; dead rows keep theirs."""
    prefix, n, d = f"layers.{layer}.engram", config.hc_mult, config.hidden_size
    live = np.nonzero(rows[:, 0] >= 0)[0]
    if len(live) == 0:
        return streams
    looked_up = weights.table_rows(f"{prefix}.embed", rows[live]).reshape(len(live), -1)
    kv = (looked_up @ weights.matrix(f"{prefix}.wkv").T).reshape(len(live), n + 1, d)
    key, value = kv[:, :n], kv[:, n]
    product = weights.plain(f"{prefix}.q_weight") * weights.plain(f"{prefix}.k_weight")
    x = streams[live]
    dot = np.sum(rms_norm(x, product, config.rms_norm_eps) * rms_norm(key, None, config.rms_norm_eps), -1)
    dot = dot / np.sqrt(np.array(d, x.dtype))
    gate = sigmoid(np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6)))
    out = streams.copy()
    out[live] += gate[:, :, None] * value[:, None, :]
    return out
