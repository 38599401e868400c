"""Loads to plan on without a model: experts of lognormal popularity, by topic, and topics that come and go.

A step's tokens are drawn from a mixture of topics; how uneven the mixture of a step is says how bursty the load is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_core.check import require


@dataclass(frozen=True)
class Load:
    """A synthetic load.

    Attributes:
        topics: how many kinds of text there are; 1 makes all steps alike.
        concentration: of the symmetric Dirichlet distribution that a step's mixture is drawn from; small is bursty.
        sigma: of the lognormal popularity of an expert in a topic.
        tokens: tokens a step over all ranks.
        top_k: experts a token.
    """

    topics: int
    concentration: float
    sigma: float = 1.0
    tokens: int = 15_400
    top_k: int = 6


ALIKE = Load(topics=1, concentration=1.0)
MILD = Load(topics=8, concentration=1.0)
BURSTY = Load(topics=8, concentration=0.14)


def draw(load: Load, steps: int, layers: int, experts: int, seed: int, drift: float = 0.0) -> np.ndarray:
    """Counts of `steps` steps, float32 [steps, layers, experts]; each layer of a step sums to tokens x top_k.

    `drift` is the sigma of a lognormal change of every popularity: the same seed with and without it is one load before
    and after it has changed.
    """
    require(drift >= 0, "drift", drift, "0 or more")
    require(min(steps, layers, experts) > 0, "steps, layers, experts", (steps, layers, experts), "1 or more")
    rng = np.random.default_rng(seed)
    popularity = rng.lognormal(0.0, load.sigma, (layers, load.topics, experts))
    popularity *= np.random.default_rng([seed, 1]).lognormal(0.0, drift, popularity.shape)
    popularity /= popularity.sum(-1, keepdims=True)
    # One mixture for all layers of a step: they see the same tokens.
    mixture = rng.dirichlet(np.full(load.topics, load.concentration), steps)
    chances = np.einsum("st,lte->sle", mixture, popularity)
    chances /= chances.sum(-1, keepdims=True)
    return rng.multinomial(load.tokens * load.top_k, chances).astype(np.float32)
