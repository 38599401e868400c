"""Decoding of stored weights in the reference, and stacking of checkpoint tensors."""

from __future__ import annotations

import pytest
import torch

import mega_moe
from mega_moe import reference


def test_scale_bytes():
    value = reference.decode_scale(torch.tensor([0, 1, 0x73, 0x78, 127, 254, 255], dtype=torch.uint8))
    assert value[:6].tolist() == [2.0**-127, 2.0**-126, 2.0**-12, 2.0**-7, 1.0, 2.0**127] and value[6].isnan()


def test_mxfp4_codes_and_nibble_order():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(2).view(1, 16)
    value = reference.dequantize_mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8))[0]
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert value.tolist() == (positive + [-v for v in positive]) * 2


def test_fp8_block_scales_of_ragged_matrices():
    weight = torch.ones(33, 40).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    value = reference.dequantize(weight, scale)
    assert value[31, 31] == 1 and value[31, 32] == 2 and value[32, 31] == 4 and value[32, 39] == 8


def test_stack_experts(weights):
    experts = []
    for _ in range(3):
        (w1, s1), (w2, s2), (w3, s3) = weights.mxfp4(32, 64), weights.mxfp4(64, 32), weights.mxfp4(32, 64)
        experts.append((w1.view(torch.int8), s1.view(torch.float8_e8m0fnu), w2, s2, w3, s3))
    w13, s13, w2, s2 = mega_moe.stack_experts(experts)
    assert w13.shape == (3, 64, 32) and s13.shape == (3, 64, 2) and w2.shape == (3, 64, 16) and s2.shape == (3, 64, 1)
    assert torch.equal(w13[1, :32], experts[1][0].view(torch.uint8)) and torch.equal(w13[1, 32:], experts[1][4])
    assert torch.equal(s13[2, :32], experts[2][1].view(torch.uint8)) and torch.equal(s2[2], experts[2][3])
    assert all(t.dtype == torch.uint8 and t.is_contiguous() for t in (w13, s13, w2, s2))


def test_stack_experts_refuses_what_does_not_fit(weights):
    (w1, s1), (w2, s2) = weights.mxfp4(32, 64), weights.mxfp4(64, 32)
    with pytest.raises(ValueError, match=r"^experts: got an empty sequence"):
        mega_moe.stack_experts([])
    with pytest.raises(ValueError, match=r"^experts\[1\]: got shapes"):
        mega_moe.stack_experts([(w1, s1, w2, s2, w1, s1), (w1[:16], s1, w2, s2, w1, s1)])
    with pytest.raises(ValueError, match=r"^experts\[0\]: got w1"):
        mega_moe.stack_experts([(w1, s1, w2, s2, w1[:16], s1)])


def test_huge_pages_leave_contents_alone(weights):
    large, small = weights.bytes(6 << 20), weights.bytes(100)
    before, address = large.clone(), large.data_ptr()
    agreed = mega_moe.advise_huge_pages(large, small, torch.empty(8 << 20, device="meta"))
    assert agreed % (1 << 21) == 0 and 0 <= agreed <= large.nbytes
    assert torch.equal(large, before) and large.data_ptr() == address
