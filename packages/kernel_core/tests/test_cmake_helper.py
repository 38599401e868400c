"""A package outside the repository builds with the helper: one kernel, one copy an instruction set."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_core

CMAKE = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
NINJA = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(tiny LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "@CMAKE@")
include(KernelCore)
kernel_core_add_module(_native BINDINGS bindings.cpp KERNELS sum.cpp)
"""
HEADER = """
#pragma once
#include <cstdint>
#include "kernel_core/isa.hpp"
namespace kernel_core {
KERNEL_CORE_DECLARE(float, sum, (int64_t n))
KERNEL_CORE_DECLARE(int, lanes, ())
}
"""
KERNEL = """
#include "sum.hpp"
#include "kernel_core/decode.hpp"
#include "kernel_core/encode.hpp"
#include "kernel_core/parallel.hpp"
namespace kernel_core { namespace KERNEL_CORE_ISA {
float sum(int64_t n) {
  float x[64], y[64];
  for (int64_t i = 0; i < 64; ++i) { x[i] = i < n ? 6.0f : 0.0f; y[i] = 0.5f; }
  uint8_t row[36];
  encode_main_row(x, row, 64);
  decode_main_row(row, x, 64);
  return dot(x, y, n);
}
int lanes() { return F32::width; }
} }
"""
BINDINGS = """
#include "sum.hpp"
#include "kernel_core/bindings.hpp"
namespace kernel_core {
void bind(pybind11::module_& m) {
  m.def("sum", [](int64_t n) { return KERNEL_CORE_PICK(sum)(n); }, NoGil());
  m.def("lanes", [] { return KERNEL_CORE_PICK(lanes)(); });
}
}
PYBIND11_MODULE(_native, m) { kernel_core::bind_isa(m); kernel_core::bind(m); }
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (CMAKE and NINJA and importlib.util.find_spec("pybind11")),
    reason="needs cmake, ninja and pybind11 (pip install kernel_core[test])",
)
def test_a_foreign_package_builds_and_chooses_its_instruction_set(tmp_path):
    files = {
        "CMakeLists.txt": PROJECT.replace("@CMAKE@", kernel_core.cmake_dir().as_posix()),
        "csrc/sum.hpp": HEADER,
        "sum.cpp": KERNEL,
        "bindings.cpp": BINDINGS,
    }
    (tmp_path / "csrc").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    build = tmp_path / "build"
    for command in (
        [CMAKE, "-S", tmp_path, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}",
         f"-DPython_EXECUTABLE={sys.executable}"],
        [CMAKE, "--build", build],
        [CMAKE, "--install", build, "--prefix", tmp_path / "site"],
    ):  # fmt: skip
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stdout + done.stderr, done.stdout + done.stderr

    (library,) = (tmp_path / "site" / "tiny").glob("_native*")
    spec = importlib.util.spec_from_file_location("_native", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.best_isa() == kernel_core._native.best_isa()
    widths = {"scalar": 1, "avx2": 8, "avx512": 16, "amx": 16}
    for isa in kernel_core.available_isas():
        module.limit_isa(isa)
        assert module.isa() == isa
        assert module.lanes() == widths[isa]
        assert [module.sum(n) for n in (0, 1, 15, 16, 17, 64)] == [0, 3, 45, 48, 51, 192]
    with pytest.raises(ValueError, match="best of this CPU"):
        module.limit_isa("avx9")
