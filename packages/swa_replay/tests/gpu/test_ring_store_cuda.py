"""Window rows into the rings on a device: every byte as the reference leaves it."""

from __future__ import annotations

import pytest
import torch

import swa_replay
from kernel_core import using
from kernel_core.testing import assert_bitwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("floors", [False, True])
@pytest.mark.parametrize("ring_rows", [1, 134])
@pytest.mark.parametrize(
    ("row", "dtype"), [(528, torch.uint8), (66, torch.uint8), (33, torch.uint8), (64, torch.float32)]
)
def test_every_byte(row, dtype, ring_rows, floors):
    cuda = pytest.importorskip("swa_replay._cuda")
    lengths = [0, 1, 6, 0, 134, 135, 700, 1, 0]
    batch, rows = len(lengths), sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    start = torch.randint(0, 2**33, (batch,))
    floor = start + torch.randint(-5, 200, (batch,)) if floors else torch.zeros(batch, dtype=torch.int64)
    slot = torch.randperm(12)[:batch].int()
    if dtype == torch.uint8:
        new, ring = (torch.randint(0, 256, s).to(dtype) for s in ((rows, row), (12, ring_rows, row)))
    else:
        new, ring = torch.randn(rows, row), torch.randn(12, ring_rows, row)
    device = [t.cuda() for t in (new, ring, slot, cu, start, floor)]
    with using("reference"):
        swa_replay.store_window(new, ring, slot, cu, start, floor)
    cuda.store_window(
        *(t.data_ptr() for t in device), rows, row * new.element_size(), batch, 12, ring_rows,
        torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    assert_bitwise(device[1].cpu(), ring)
