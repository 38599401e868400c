"""Which implementation an op takes, and how it gets to its CUDA module."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import kernel_core
from kernel_core import cuda, elsewhere, formats, using
from kernel_core.testing.bindings import FakeModule, bindings

CPU = torch.zeros(1)
GPU = SimpleNamespace(is_cpu=False, is_cuda=True, device="cuda:0")


@pytest.mark.parametrize(
    ("backend", "tensor", "kernels", "triton", "path"),
    [
        ("native", CPU, True, True, ""),
        ("native", GPU, True, True, "cuda"),
        ("native", GPU, False, False, "library"),
        ("library", CPU, True, True, "library"),
        ("library", GPU, True, True, "library"),
        ("triton", CPU, True, True, "triton"),
        ("triton", GPU, True, True, "triton"),
        ("triton", CPU, True, False, ""),
        ("triton", GPU, True, False, "cuda"),
        ("triton", GPU, False, False, "library"),
    ],
)
def test_path(backend, tensor, kernels, triton, path):
    with using(backend):
        assert elsewhere("x.op", tensor, kernels=kernels, triton=triton) == path


def test_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match=r"x.op .*'meta'.*cpu and cuda"):
        elsewhere("x.op", torch.empty(1, device="meta"), kernels=True)


def test_backends_are_listed():
    with pytest.raises(ValueError, match="'native', 'reference', 'library', 'triton'"), using("fast"):
        pass


def test_a_missing_module_says_what_to_do(monkeypatch):
    cuda.cuda_module.cache_clear()
    with pytest.raises(RuntimeError, match=r"kernel_core was built without.*FATHOM_CUDA=ON"):
        cuda.cuda_module("kernel_core")
    monkeypatch.setitem(sys.modules, "kernel_core._cuda", kernel_core)
    assert cuda.cuda_module("kernel_core") is kernel_core
    cuda.cuda_module.cache_clear()


def test_the_current_gpu_is_the_only_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    assert cuda.stream(torch.device("cuda", 1)) == 7
    with pytest.raises(ValueError, match="cuda:0, allowed is the current one, cuda:1"):
        cuda.stream(torch.device("cuda", 0))


def test_addresses():
    x = torch.zeros(9, dtype=torch.uint8)
    assert cuda.pointer(None) == 0 and cuda.pointer(x) == x.data_ptr()
    assert cuda.aligned(None, x) and not cuda.aligned(x, x[1:])
    assert cuda.workspace(0, x.device).numel() == 1 and cuda.aligned(cuda.workspace(33, x.device))
    cuda.same_device(x, a=None, b=x)
    with pytest.raises(ValueError, match="b: got a tensor on meta, allowed is cpu"):
        cuda.same_device(x, a=x, b=x.to("meta"))


def test_stand_in_for_a_compiled_module(tmp_path):
    (tmp_path / "bindings_x.cpp").write_text(
        'm.def("f", &f, py::arg("a"), py::arg("b") = 0);\nm.def(\n    "g", [](int c) {}, py::arg("c"));\n'
    )
    assert bindings(tmp_path) == {"f": {"a": False, "b": True}, "g": {"c": False}}
    module = FakeModule(tmp_path, {"f": 3, "g": lambda c: c + 1})
    assert module.f(1) == module.f(a=1, b=2) == 3 and module.g(c=4) == 5
    assert module.calls == [("f", {"a": 1}), ("f", {"a": 1, "b": 2}), ("g", {"c": 4})]
    for wrong in (lambda: module.f(), lambda: module.f(1, c=2), lambda: module.f(1, 2, 3), lambda: module.f(a=None)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(AttributeError, match="'h'"):
        module.h()


def test_decoding_takes_no_table_from_the_host():
    codes = torch.arange(16, dtype=torch.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    decoded = formats.decode_e2m1(codes)
    assert decoded.tolist() == [*values, *(-v for v in values)] and torch.signbit(decoded[8])
