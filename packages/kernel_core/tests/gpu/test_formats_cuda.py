"""The decoders on a device give the bits that they give on the host, subnormals included."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernel_core.paths import include_dir
from kernel_core.testing.host import address, host_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    return host_library(HERE.parent / "host" / "formats.cpp", tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def device(tmp_path_factory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("device") / "formats.so"
    command = ["nvcc", "-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC", "-shared",
               f"-I{include_dir()}", "-o", str(library), str(HERE / "formats.cu")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize(
    ("name", "codes", "pairs", "flag"),
    [
        ("decode_e2m1x8", 16, 4, 0),
        ("decode_e2m1x8", 16, 4, 1),
        ("decode_e4m3x4", 256, 2, 0),
        ("decode_e4m3x4", 256, 2, 1),
    ],
)
def test_every_code_under_every_scale(host, device, name, codes, pairs, flag):
    lanes, bits = 2 * pairs, 16 // pairs
    code, scale = torch.meshgrid(torch.arange(codes), torch.arange(256), indexing="ij")
    code, scale = code.flatten(), scale.flatten().to(torch.uint8)
    if name == "decode_e4m3x4" and flag:
        folds = (scale <= 134) | (scale == 255)
        code, scale = code[folds].contiguous(), scale[folds].contiguous()
    word = ((code[:, None] + torch.arange(lanes)) % codes << torch.arange(lanes) * bits).sum(1).to(torch.int32)
    count = ctypes.c_int64(len(word))
    expected = torch.empty(len(word), lanes, dtype=torch.bfloat16)
    getattr(host, name)(address(word), address(scale), flag, address(expected), count)
    words, scales, out = word.cuda(), scale.cuda(), expected.cuda().zero_()
    torch.cuda.synchronize()
    assert getattr(device, name)(pointer(words), pointer(scales), flag, pointer(out), count) == 0
    actual, nan = out.cpu(), expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


def test_e2m1_as_e4m3(host, device):
    low = torch.arange(65536)
    word = (low | (low.flip(0) << 16)).to(torch.int32)
    expected = torch.empty(len(word), 8, dtype=torch.uint8)
    count = ctypes.c_int64(len(word))
    host.e2m1_to_e4m3(address(word), address(expected), count)
    words, out = word.cuda(), expected.cuda().zero_()
    torch.cuda.synchronize()
    assert device.e2m1_to_e4m3(pointer(words), pointer(out), count) == 0
    assert torch.equal(out.cpu(), expected)
