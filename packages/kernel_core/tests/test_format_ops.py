"""The codecs through the dispatcher: same bytes, and shapes that torch.compile can derive."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_core import format_ops, formats, using
from kernel_core.testing import assert_bitwise

NAMES = sorted(name.removeprefix("quantize_") for name in format_ops._SCHEMAS if name.startswith("quantize_"))


def parts(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", NAMES)
def test_dispatcher_gives_the_bytes_and_the_fake_their_shapes(name):
    quantize, dequantize = (getattr(torch.ops.kernel_core, f"{verb}_{name}") for verb in ("quantize", "dequantize"))
    x = torch.randn(6, 64)
    packed = parts(quantize(x))
    for part, expected in zip(packed, parts(getattr(formats, f"quantize_{name}")(x)), strict=True):
        assert_bitwise(part.view(torch.uint8), expected.view(torch.uint8))
    values = dequantize(*packed)
    assert_bitwise(values, getattr(formats, f"dequantize_{name}")(*packed))
    with FakeTensorMode():
        fake = parts(quantize(torch.empty(6, 64)))
        assert [(f.shape, f.dtype) for f in fake] == [(p.shape, p.dtype) for p in packed]
        assert dequantize(*fake).shape == values.shape


def test_the_library_path_gives_the_same_bytes():
    x = torch.randn(5, 64)
    ops = torch.ops.kernel_core
    for name in ("quantize_main", "quantize_window", "quantize_index"):
        native = getattr(ops, name)(x)
        with using("library"):
            assert getattr(ops, name)(x).equal(native)
            back = getattr(ops, name.replace("quantize", "dequantize"))(native)
        assert back.equal(getattr(ops, name.replace("quantize", "dequantize"))(native))
