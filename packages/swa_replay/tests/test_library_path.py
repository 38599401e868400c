"""What a GPU runs without a kernel, on the CPU: equal to the reference in every byte."""

from __future__ import annotations

import pytest
import torch

import swa_replay
from kernel_core import using
from kernel_core.testing import assert_bitwise


@pytest.mark.parametrize("floors", [False, True])
@pytest.mark.parametrize("ring_rows", [1, 3, 134])
@pytest.mark.parametrize("lengths", [[1], [0, 1, 6, 0, 2, 140, 0], []])
def test_store_window(lengths, ring_rows, floors):
    batch, rows = len(lengths), sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    start = torch.randint(0, 2**33, (batch,))
    floor = start + torch.randint(-5, 9, (batch,)) if floors else torch.zeros(batch, dtype=torch.int64)
    slot = torch.randperm(8)[:batch].int()
    new, ring = (torch.randint(0, 256, s).to(torch.uint8) for s in ((rows, 33), (8, ring_rows, 33)))
    rings = [ring.clone(), ring.clone()]
    for backend, target in zip(("reference", "library"), rings, strict=True):
        with using(backend):
            swa_replay.store_window(new, target, slot, cu, start, floor)
    assert_bitwise(rings[1], rings[0])
