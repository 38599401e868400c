"""Shared problems."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Quick on a busy machine; the tests about threads ask for more themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Step:
    """Arguments of `hc_step` for T tokens of d channels."""

    X: torch.Tensor
    y: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    pre_mix: torch.Tensor
    norm_weight: torch.Tensor

    @property
    def update(self) -> tuple[torch.Tensor, ...]:
        return self.y, self.post, self.comb

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return self.fn, self.base, self.scale

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """All in the order of `hc_step`, with a copy of X."""
        return self.X.clone(), *self.update, *self.parameters, self.pre_mix, self.norm_weight


@pytest.fixture
def make_step():
    def make(T: int, d: int, seed: int = 0) -> Step:
        g = torch.Generator().manual_seed(seed * 1_000_003 + T * 7919 + d)
        n = 4
        rand, randn = partial(torch.rand, generator=g), partial(torch.randn, generator=g)
        return Step(
            X=3 * randn(T, n, d),
            y=randn(T, d),
            post=2 * rand(T, n),
            comb=rand(T, n, n),
            fn=randn(24, n * d) / (n * d) ** 0.5 * 3,
            base=randn(24) * 0.5,
            scale=rand(3) + 0.5,
            pre_mix=rand(T, n),
            norm_weight=rand(d) + 0.5,
        )

    return make


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers for a test whichever others run, and in whichever order."""
    torch.manual_seed(0)
