"""The codecs with tensors on an NVIDIA GPU: the CPU's bytes, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch

from kernel_core import format_ops
from kernel_core.testing import assert_bitwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NAMES = sorted(name.removeprefix("quantize_") for name in format_ops._SCHEMAS if name.startswith("quantize_"))


def parts(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_cpu(name):
    quantize, dequantize = (getattr(torch.ops.kernel_core, f"{verb}_{name}") for verb in ("quantize", "dequantize"))
    x = torch.randn(64, 96) * torch.logspace(-6, 3, 64)[:, None]
    x[5, 7], x[6] = torch.nan, 0.0
    device = x.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = parts(quantize(device))
        values = dequantize(*packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = parts(quantize(x))
    for ours, theirs in zip(packed, expected, strict=True):
        assert_bitwise(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(values.cpu().nan_to_num(7e7), dequantize(*expected).nan_to_num(7e7))
