"""Shared problems."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Quick on a busy machine; the tests about threads ask for more themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_rows():
    """Logits and parameters of T rows that mix every setting: (logits, temperature, top_p, top_k, seeds, positions)."""

    def make(T: int, V: int, spread: float = 2.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
        g = torch.Generator().manual_seed(seed * 7919 + T * 131 + V)
        logits = torch.randn(T, V, generator=g) * spread
        temperature = 0.2 + 1.5 * torch.rand(T, generator=g)
        temperature[::5] = 0.0
        temperature[1::5] = 1.0
        top_p = 0.005 + 0.99 * torch.rand(T, generator=g)
        top_p[::3] = 1.0
        top_k = torch.randint(0, min(V, 60) + 2, (T,), generator=g, dtype=torch.int32)
        top_k[::4] = 0
        seeds = torch.randint(-(2**62), 2**62, (T,), generator=g)
        positions = torch.randint(0, 2**20, (T,), generator=g)
        return logits, temperature, top_p, top_k, seeds, positions

    return make


@pytest.fixture
def draw():
    """Tokens of many seeds for one distribution: draw(logits[V], count, temperature=1, top_p=1, top_k=0, case=0)."""
    import dspark_kernels

    def draws(logits, count, temperature=1.0, top_p=1.0, top_k=0, case=0):
        tokens, _ = dspark_kernels.sample(
            logits.expand(count, -1).contiguous(),
            torch.full((count,), temperature),
            torch.full((count,), top_p),
            torch.full((count,), top_k, dtype=torch.int32),
            torch.arange(count),
            torch.full((count,), 11),
            case=case,
        )
        return tokens

    return draws


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers for a test whichever others run, and in whichever order."""
    torch.manual_seed(0)
