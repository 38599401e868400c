"""The public ops with tensors on an NVIDIA GPU: the reference's results, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch

import swa_replay
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def case(heads, dim, window, rope, packed):
    rows = formats.quantize_window if packed else lambda x: x
    return {
        "q": torch.randn(8, heads, dim).bfloat16().float(),
        "new_rows": rows(torch.randn(8, dim)),
        "ring": rows(torch.randn(4, window + 6, dim)),
        "ring_slot": torch.tensor([2, 0, 3]).int(),
        "cu_seqlens": torch.tensor([0, 3, 7, 8]).int(),
        "start_pos": torch.tensor([0, 5, 300]),
        "lower": torch.tensor([0, 2, 0]),
        "window": window,
        "sink": torch.randn(heads),
        "rope": torch.randn(8, rope),
        "scale": dim**-0.5,
    }


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("heads", [4, 40, 64])
@pytest.mark.parametrize(
    ("dim", "window", "rope", "packed"), [(512, 128, 64, True), (512, 128, 64, False), (64, 32, 16, True)]
)
def test_window_attention(heads, dim, window, rope, packed, block):
    host = case(heads, dim, window, rope, packed)
    device = {name: value.cuda() if torch.is_tensor(value) else value for name, value in host.items()}
    with using("reference"):
        expected = swa_replay.window_attention(**host, block=block)
    swa_replay.window_attention(**device, block=block)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = swa_replay.window_attention(**device, block=block)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # weights rounded to bfloat16 move single elements near zero; rows as a whole stay at the usual bound
    assert_close(actual.cpu(), expected, atol=6e-3, rtol=2.01 / 128, max_diff=5e-6)


@pytest.mark.parametrize("backend", ["native", "library"])
def test_store_window(backend):
    cu, start = torch.tensor([0, 1, 1, 141]).int(), torch.tensor([40, 3, 7])
    floor, slot = torch.tensor([0, 0, 30]), torch.tensor([3, 0, 1]).int()
    new, ring = (torch.randint(0, 256, s).to(torch.uint8) for s in ((141, 528), (4, 134, 528)))
    device = [t.cuda() for t in (new, ring, slot, cu, start, floor)]
    with using("reference"):
        swa_replay.store_window(new, ring, slot, cu, start, floor)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with using(backend):
            swa_replay.store_window(*device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_bitwise(device[1].cpu(), ring)
