"""Constants of the Engram hash: bucket sizes, multipliers, offsets. Nothing of this is stored in a checkpoint."""

from __future__ import annotations

import numpy as np
import torch

from kernel_core.check import require

_SEED_STEP = 10007


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % f for f in range(3, int(n**0.5) + 1, 2))


def engram_primes(layers: int, orders: int, heads: int, base: int) -> torch.Tensor:
    """Bucket sizes, int64 [layers, orders * heads]; column (order, head), the 2-gram first.

    The smallest primes >= `base`, none used twice, handed out in the order (layer, n-gram order, head). Over all
    Engram layers of a model at once, since a later layer goes on where the one before stopped.
    """
    require(layers >= 0 and orders >= 1 and heads >= 1, "layers, orders, heads", (layers, orders, heads), "positive")
    require(base >= 2, "base", base, "2 or more")
    primes: list[int] = []
    candidate = base
    while len(primes) < layers * orders * heads:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return torch.tensor(primes, dtype=torch.int64).reshape(layers, orders * heads)


def engram_offsets(primes: torch.Tensor) -> torch.Tensor:
    """First table row of each bucket: exclusive prefix sums over the last dimension, int64."""
    return torch.cumsum(primes, -1) - primes


def engram_table_rows(primes: torch.Tensor) -> list[int]:
    """Rows of each layer's table: the sum of its bucket sizes, without padding."""
    return primes.sum(-1).reshape(-1).tolist()


def engram_multipliers(layer: int, compressed_vocab: int, count: int = 4) -> torch.Tensor:
    """Odd multipliers of a layer, int64 [count], one a shift (0 = the token itself).

    `layer` is the model's layer index: it seeds NumPy's default generator. The bound keeps the product of a
    multiplier and a mapped id below 2^63.
    """
    require(layer >= 0, "layer", layer, "0 or more")
    require(compressed_vocab >= 1, "compressed_vocab", compressed_vocab, "1 or more")
    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    draws = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, count, dtype=np.int64)
    return torch.from_numpy(2 * draws + 1)
