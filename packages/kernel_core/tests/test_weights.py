"""Packed weights, and the first bytes of two tensors of the published checkpoint."""

import pytest
import torch

from kernel_core import formats, native_formats
from kernel_core.testing import assert_bitwise

# First bytes of row 0 with their scale byte, and the values that they stand for.
WKV = "d871f2797069f0e55370eee3dcd8776d6bdc6bf25b66716b5c6d71d0eae7e062"
WKV_VALUES = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
W1 = "a0a8ec4aadaf42aacc82256ffa054544"
W1_VALUES = [0.0, -0.0078125, 0.0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625,
             -0.0234375, -0.0078125, -0.046875, -0.0078125, 0.0078125, 0.015625, -0.0078125, -0.0078125]  # fmt: skip


def raw(digits: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(digits)), dtype=torch.uint8)[None]


@pytest.mark.parametrize("module", [formats, native_formats])
def test_bytes_of_the_published_attention_weight(module):
    scale = torch.tensor([[0x73]], dtype=torch.uint8)
    values = module.dequantize_fp8_block(raw(WKV).view(torch.float8_e4m3fn), scale)
    assert values[0, :8].tolist() == WKV_VALUES
    assert module.dequantize_fp8_rows(raw(WKV), scale)[0, :8].tolist() == WKV_VALUES


@pytest.mark.parametrize("module", [formats, native_formats])
def test_bytes_of_the_published_expert_weight(module):
    scale = torch.tensor([[0x78]], dtype=torch.uint8)
    for codes in (raw(W1), raw(W1).view(torch.int8)):
        assert module.dequantize_mxfp4(codes, scale)[0, :16].tolist() == W1_VALUES


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 31), (64, 96), (70, 100), (1, 65)])
def test_fp8_block_scale_covers_32_by_32(shape):
    weight = torch.randn(shape) * 3
    codes, scales = formats.quantize_fp8_block(weight)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape
    assert scales.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            tile = weight[r * 32 : r * 32 + 32, c * 32 : c * 32 + 32]
            scale = 2.0 ** (int(scales[r, c]) - 127)
            assert scale / 2 < tile.abs().max().item() / 448 <= scale
    back = formats.dequantize_fp8_block(codes, scales)
    assert ((back - weight).abs() <= weight.abs() / 16 + 2.0**-9 * scales.max().sub(127).float().exp2()).all()
    assert_bitwise(back.bfloat16().float(), back)


def test_mxfp4_of_a_stack_of_experts():
    weight = torch.randn(3, 5, 64)
    codes, scales = formats.quantize_mxfp4(weight)
    assert codes.shape == (3, 5, 32) and scales.shape == (3, 5, 2)
    back = formats.dequantize_mxfp4(codes, scales)
    assert_bitwise(back[1, 2:3], formats.dequantize_mxfp4(*formats.quantize_mxfp4(weight[1, 2:3])))
    assert_bitwise(back, formats.dequantize_index(formats.quantize_index(weight)))


def test_fp8_rows_are_window_rows_taken_apart():
    table = torch.randn(4, 256)
    codes, scales = formats.quantize_fp8_rows(table)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (4, 8)
    assert_bitwise(torch.cat((codes.view(torch.uint8), scales), 1), formats.quantize_window(table))


def test_scale_bytes_at_the_ends():
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)
    for byte, value in ((0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127)):
        scale = torch.tensor([[byte]], dtype=torch.uint8)
        for module in (formats, native_formats):
            assert (module.dequantize_mxfp4(codes, scale).double() == value).all()
    for module in (formats, native_formats):
        assert module.dequantize_mxfp4(codes, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("module", [formats, native_formats])
def test_scales_of_the_wrong_shape(module):
    byte = dict(dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales: got shape \[2, 1\]"):
        module.dequantize_mxfp4(torch.zeros(2, 32, **byte), torch.zeros(2, 1, **byte))
    with pytest.raises(ValueError, match=r"scales: got shape \[1, 1\]"):
        module.dequantize_fp8_block(torch.zeros(33, 32, **byte), torch.zeros(1, 1, **byte))
    with pytest.raises(ValueError, match=r"scales: got shape \[2, 2\]"):
        module.dequantize_fp8_rows(torch.zeros(2, 32, **byte), torch.zeros(2, 2, **byte))
