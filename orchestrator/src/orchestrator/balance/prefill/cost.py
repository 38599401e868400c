"""What a prefill step takes, and its inverse: the largest chunk that fits into a time budget.

A chunk of q tokens behind c computed ones costs `token q + prefix c + pair q (c + q / 2)` seconds, the last chunk of a
prompt `tail` more (decoder layers run on a prompt's last tokens only), a step `launch` once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kernel_core.check import require

BLOCK = 128  # tokens; chunks end at its multiples, so that a block is never split over two steps


@dataclass(frozen=True)
class Chunk:
    """`tokens` of a prompt computed behind `computed` ones; `final` ends the prompt."""

    tokens: int
    computed: int
    final: bool = False


@dataclass(frozen=True)
class PrefillCost:
    """Constants of an engine, seconds.

    Attributes:
        launch: of a step. token: for each token computed (linear layers, experts, top-k attention).
        prefix: for each token in the cache before a chunk (what swap-in does not hide).
        pair: for each pair of a new token and a token that it sees (index scores).
        tail: of the chunk that ends a prompt.
    """

    launch: float
    token: float
    prefix: float = 0.0
    pair: float = 0.0
    tail: float = 0.0

    def __post_init__(self) -> None:
        for name in ("launch", "token", "prefix", "pair", "tail"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, value, "finite, 0 or more")

    def chunk(self, chunk: Chunk) -> float:
        """Seconds that a chunk adds to a step."""
        q, c = chunk.tokens, chunk.computed
        return self.token * q + self.prefix * c + self.pair * q * (c + q / 2) + (self.tail if chunk.final else 0.0)

    def step(self, chunks: Iterable[Chunk]) -> float:
        """Seconds of a step; an empty one takes `launch`, since an idle rank takes part."""
        return self.launch + sum(map(self.chunk, chunks))

    def prompt(self, missed: int, hit: int) -> float:
        """Seconds that a prompt asks for, apart from launches: `missed` tokens computed behind `hit` cached ones."""
        return self.chunk(Chunk(missed, hit, final=True))

    def fitting(self, seconds: float, computed: int) -> float:
        """The real q that takes exactly `seconds` behind `computed` tokens, not ending the prompt; 0 if none does.

        `2 R / (b + sqrt(b^2 + 2 pair R))` with b = token + pair c is the stable form of the quadratic's root: where
        `pair` is 0 it becomes R / b.
        """
        left = seconds - self.prefix * computed
        if left <= 0:
            return 0.0
        b = self.token + self.pair * computed
        root = b + math.sqrt(b * b + 2 * self.pair * left)
        return 2 * left / root if root > 0 else math.inf

    def largest(self, seconds: float, computed: int, remaining: int, most: int | None = None) -> int:
        """Tokens of the largest chunk that takes no more than `seconds`; 0 where not even a block fits.

        Args:
            computed: tokens of the prompt that are in the cache; remaining: those that are not.
            most: a cap (free cache, rows of a step); None for none.

        A chunk ends at a multiple of BLOCK or ends the prompt, and leaves at least BLOCK tokens for the last chunk
        where there are so many.
        """
        if remaining <= 0:
            return 0
        cap = remaining if most is None else min(remaining, most)
        if cap == remaining and self.chunk(Chunk(remaining, computed, final=True)) <= seconds:
            return remaining
        end = computed + math.floor(min(self.fitting(seconds, computed), cap))
        end -= end % BLOCK
        while end > computed and (
            computed + remaining - end < BLOCK or self.chunk(Chunk(end - computed, computed)) > seconds
        ):  # the second only by rounding
            end -= BLOCK
        return max(0, end - computed)


# 70, 200 and 730 ms a step of 4,096, 16,384 and 65,536 tokens a rank, as published for V4.1-Flash, within 1 %.
PUBLISHED = PrefillCost(launch=24.4e-3, token=10.74e-6)
