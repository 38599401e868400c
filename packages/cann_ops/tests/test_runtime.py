"""What stands between an op and a device: what is missing is named, arguments packed, compile commands whole."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cann_ops
import kernel_core
from cann_ops import lowering
from cann_ops.kernels import Kernel
from cann_ops.launch import _run_on_host
from cann_ops.lowering import Lowered, Parameter
from cann_ops.runtime import acl, available, binaries
from cann_ops.shapes import SHAPES

LOWERED = Lowered(Kernel.of("k"), "text", "k_kernel", "__vector__", 64, 1024, (), {}, {})


def test_importing_needs_neither_torch_npu_nor_tilelang():
    text = """
import sys
class No:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch_npu", "tilelang", "tvm", "tvm_ffi"):
            raise ImportError(f"no {name}")
sys.meta_path.insert(0, No())
import cann_ops
from cann_ops import lowering
print(cann_ops.is_available, lowering.available()[0], len(cann_ops.status()))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " False " in done.stdout


def test_without_a_device_the_first_missing_step_is_named(monkeypatch):
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: None)
    there, why = cann_ops.is_available()
    assert not there and "torch_npu is not installed" in why
    with pytest.raises(cann_ops.CannUnavailableError, match="some_op needs an Ascend 950: torch_npu is not installed"):
        available.require_npu("some_op")


@pytest.mark.parametrize("error", [ImportError("libhccl.so"), OSError("libhccl.so"), RuntimeError("libhccl.so")])
def test_a_torch_npu_that_does_not_import_is_named(monkeypatch, error):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "torch_npu":
                raise error

    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    there, why = cann_ops.is_available()
    assert not there and "libhccl.so" in why and "set_env.sh" in why


@pytest.mark.parametrize(
    "seen, name, said", [(False, "", "sees no device"), (True, "Ascend910B", "the device is Ascend910B")]
)
def test_another_device_is_named(monkeypatch, seen, name, said):
    class Npu:
        is_available = staticmethod(lambda: seen)
        get_device_name = staticmethod(lambda: name)

    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_npu", object())
    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    there, why = cann_ops.is_available()
    assert not there and said in why


def test_cpu_tensors_are_refused_unless_something_is_asked_for():
    x = torch.zeros(2, 512)
    with pytest.raises(cann_ops.CannUnavailableError, match=r"kv_rows: got a tensor on cpu.*host_emulation"):
        cann_ops.kv_rows(x, None, 1.0, None)
    with kernel_core.using("reference"):
        assert cann_ops.kv_rows(x, None, 1.0, None).shape == (2, 288)
    with pytest.raises(cann_ops.CannUnavailableError, match="got a tensor on meta"):
        cann_ops.hc_mix(torch.empty(1, 4, 64, device="meta"), torch.empty(1, 4, device="meta"), None)


def test_registered_ops_say_what_is_missing_too():
    with pytest.raises(cann_ops.CannUnavailableError, match=r"cann_ops\.route"):
        torch.ops.cann_ops.route(torch.zeros(1, 8), torch.zeros(8), 2)
    with torch._subclasses.FakeTensorMode():
        codes, scales = torch.ops.cann_ops.norm_quantize(torch.empty(3, 1024), None)
    assert codes.shape == (3, 1024) and codes.dtype == torch.float8_e4m3fn and scales.shape == (3, 32)


def test_arguments_are_packed_as_a_struct_of_c():
    class Arguments(ctypes.Structure):
        _fields_ = (
            ("a", ctypes.c_void_p), ("n", ctypes.c_int32), ("b", ctypes.c_void_p), ("eps", ctypes.c_float),
            ("big", ctypes.c_int64), ("last", ctypes.c_int32),
        )  # fmt: skip

    parameters = [
        Parameter("a", "float", True), Parameter("n", "int32_t", False), Parameter("b", "uint8_t", True),
        Parameter("eps", "float", False), Parameter("big", "int64_t", False), Parameter("last", "int32_t", False),
    ]  # fmt: skip
    values = (2**40 + 1, -3, 7, 0.5, -(2**50), 9)
    packed = acl.pack_arguments(parameters, values)
    assert packed == bytes(Arguments(*values))[: ctypes.sizeof(Arguments)] and len(packed) % 8 == 0
    assert acl.pack_arguments([], []) == b""
    assert acl.pack_arguments([Parameter("flag", "uint8_t", False)], [3]) == struct.pack("<q", 3)
    with pytest.raises(ValueError, match="x: got a scalar of half"):
        acl.pack_arguments([Parameter("x", "half", False)], [1])


def test_without_cann_its_library_is_named():
    acl._library.cache_clear()
    with pytest.raises(cann_ops.CannUnavailableError, match=r"libascendcl\.so does not load"):
        acl.launch(ctypes.c_void_p(), 1, 0, 0, b"")


def test_a_binary_is_named_by_its_text(monkeypatch, tmp_path):
    monkeypatch.setenv("CANN_OPS_BINARIES", str(tmp_path))
    path = binaries.binary_path(LOWERED)
    assert path.parent == tmp_path and path.name.startswith("k_kernel-") and path.suffix == ".aibin"
    other = Lowered(**(vars(LOWERED) | {"source": "another text"}))
    assert binaries.binary_path(other) != path


def test_compilers_that_are_not_there_are_named(monkeypatch, tmp_path):
    for variable in ("BISHENG_HOME", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(cann_ops.CannUnavailableError, match=r"bisheng was not found.*CANN 9\.2"):
        binaries.tool("bisheng")


def test_a_kernel_is_compiled_then_linked(monkeypatch, tmp_path):
    """With stand-ins for both tools: their commands, and a binary only if both end well."""
    (tmp_path / "bin").mkdir()
    log = tmp_path / "log"
    for name, code in (("bisheng", 0), ("ld.lld", 0)):
        tool = tmp_path / "bin" / name
        tool.write_text(
            f'#!/bin/sh\necho "{name} $@" >> {log}\nfor last; do :; done\necho made > "$last"\nexit {code}\n'
        )
        tool.chmod(0o755)
    monkeypatch.setenv("BISHENG_HOME", str(tmp_path))
    monkeypatch.setenv("CANN_OPS_BINARIES", str(tmp_path / "out"))
    binary = binaries.build(LOWERED, Path("/templates"))
    assert binary.read_text() == "made\n" and binary.with_suffix(".asc").read_text() == "text"
    compiled, linked = log.read_text().splitlines()
    assert "--npu-arch=dav-3510" in compiled and "--cce-aicore-only" in compiled and "-I/templates" in compiled
    assert linked.startswith("ld.lld -m aicorelinux")
    assert sorted(p.suffix for p in binary.parent.iterdir()) == [".aibin", ".asc"]
    (tmp_path / "bin" / "ld.lld").write_text("#!/bin/sh\necho no; exit 1\n")
    failing = Lowered(**(vars(LOWERED) | {"source": "worse"}))
    with pytest.raises(RuntimeError, match="no"):
        binaries.build(failing, Path("/templates"))
    assert not binaries.binary_path(failing).exists()


def test_every_launched_op_has_a_status(monkeypatch, tmp_path):
    monkeypatch.setenv("CANN_OPS_CACHE", str(tmp_path))
    seen = cann_ops.status()
    own = {"gather_window", "is_available", "host_emulation", "status"}
    ops = {name for name in cann_ops.__all__ if name[0].islower()} - own
    assert ops <= set(seen), ops - set(seen)
    assert all(entry["npu_run"] == "never" == entry["bisheng_compiled"] for entry in seen.values())
    (tmp_path / "device_status.json").write_text('{"route": "pass"}')
    now = cann_ops.status()
    assert now["route"]["npu_run"] == "pass" and now["kv_rows"]["npu_run"] == "never"


def test_shapes_are_distinct_and_name_public_ops():
    kernels = [shape.kernel for shape in SHAPES]
    assert len(set(kernels)) == len(kernels)
    assert {op for shape in SHAPES for op in shape.ops} <= set(cann_ops.__all__)


def test_emulation_without_the_headers_says_so(monkeypatch):
    monkeypatch.setattr("cann_ops.emulate.build.templates_dir", lambda: None)
    with pytest.raises(cann_ops.NotLoweredError, match=r"k\(\): emulation compiles against TileLang's headers"):
        _run_on_host(LOWERED, {}, [], {})


def test_lowering_without_tilelang_says_so(monkeypatch):
    monkeypatch.setattr(lowering, "available", lambda: (False, "TileLang is not installed"))
    with pytest.raises(cann_ops.NotLoweredError, match="TileLang is not installed"):
        lowering.lower(Kernel.of("kv_rows", D=17))
