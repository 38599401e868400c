"""Ragged batches for the window tests: rings full of another request's bytes, and shapes of both small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kernel_core import formats

Case = dict[str, Any]


def _build(
    lengths: Sequence[int],
    starts: Sequence[int],
    *,
    heads: int = 4,
    dim: int = 64,
    rope_dim: int = 16,
    window: int = 32,
    ring_rows: int | None = None,
    lower: Sequence[int] | None = None,
    packed: bool = True,
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    rows, batch = sum(lengths), len(lengths)
    ring_rows = window + 6 if ring_rows is None else ring_rows
    encode = formats.quantize_window if packed else torch.clone

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    return {
        "q": normal(rows, heads, dim),
        "new_rows": encode(normal(rows, dim)),
        "ring": encode(normal(batch + 2, ring_rows, dim)),
        "ring_slot": (torch.randperm(batch + 1, generator=g)[:batch] + 1).int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "start_pos": torch.tensor(starts, dtype=torch.int64),
        "lower": torch.tensor(lower if lower is not None else [0] * batch, dtype=torch.int64),
        "window": window,
        "sink": normal(heads),
        "rope": normal(rows, rope_dim),
        "scale": dim**-0.5,
    }


@pytest.fixture
def window_case() -> Callable[..., Case]:
    return _build


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers for a test whichever others run, and in whichever order."""
    torch.manual_seed(0)
