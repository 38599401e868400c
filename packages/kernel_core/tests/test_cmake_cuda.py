"""CUDA modules of a package outside the repository: left out unless asked for, each source for its architecture."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_core

BIN = str(Path(sys.executable).parent)
CMAKE = shutil.which("cmake") or shutil.which("cmake", path=BIN)
NINJA = shutil.which("ninja") or shutil.which("ninja", path=BIN)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CMAKE and NINJA and importlib.util.find_spec("pybind11")),
        reason="needs cmake, ninja and pybind11 (pip install kernel_core[test])",
    ),
]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(tiny LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "@CMAKE@")
include(KernelCore)
kernel_core_add_cuda_module(_cuda SOURCES bindings.cpp both.cu fill.cu fill_sm100.cu COMMON both.cu)
"""
KERNEL = """
#include <cuda_runtime_api.h>
__global__ void @NAME@_kernel(float* x) { x[threadIdx.x] = 1; }
cudaError_t @NAME@(float* x) { @NAME@_kernel<<<1, 32>>>(x); return cudaGetLastError(); }
"""
BINDINGS = """
#include <pybind11/pybind11.h>
#include "kernel_core/cuda/status.hpp"
cudaError_t fill(float*);
cudaError_t fill_sm100(float*);
cudaError_t both(float*);
PYBIND11_MODULE(_cuda, m) {
  m.def("wrong", [] { kernel_core::cuda::check(cudaErrorInvalidValue, "fill"); });
  m.def("elsewhere", [] { kernel_core::cuda::check(cudaErrorNotSupported, "fill"); });
  m.def("both", [](uintptr_t x) { kernel_core::cuda::check(both(reinterpret_cast<float*>(x)), "both"); });
  m.def("fill", [](uintptr_t x) { kernel_core::cuda::check(fill(reinterpret_cast<float*>(x)), "fill"); });
  m.def("fill_sm100", [](uintptr_t x) { kernel_core::cuda::check(fill_sm100(reinterpret_cast<float*>(x)), "fill"); });
}
"""


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.replace("@CMAKE@", kernel_core.cmake_dir().as_posix()))
    (tmp_path / "bindings.cpp").write_text(BINDINGS)
    for name in ("fill", "fill_sm100", "both"):
        (tmp_path / f"{name}.cu").write_text(KERNEL.replace("@NAME@", name))
    return tmp_path


def configure(project: Path, *options: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [CMAKE, "-S", project, "-B", project / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}",
               f"-DPython_EXECUTABLE={sys.executable}", *options]  # fmt: skip
    environment = os.environ | ({"PATH": path} if path else {})
    environment = {k: v for k, v in environment.items() if k not in ("CUDACXX", "CUDA_PATH")}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment)


def ninja(project: Path, *arguments: str) -> str:
    done = subprocess.run([str(NINJA), "-C", str(project / "build"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout, done.stdout
    return done.stdout


def test_off_leaves_no_trace(project):
    done = configure(project, "-DFATHOM_CUDA=OFF")
    assert done.returncode == 0, done.stderr
    assert "CUDA" not in done.stdout
    assert "_cuda" not in ninja(project, "-t", "targets", "all")


@needs_nvcc
def test_on_builds_each_source_for_its_architecture(project):
    done = configure(project, "-DFATHOM_CUDA=ON")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = [line for line in ninja(project, "-t", "commands").splitlines() if ".cu.o" in line and " -c " in line]
    archs = {
        Path(line.split(" -c ")[1].split()[0]).name: [a for a in ("90a", "100a") if f"code=[sm_{a}]" in line]
        for line in commands
        if " -x cu " in line
    }
    assert archs == {"fill.cu": ["90a"], "fill_sm100.cu": ["100a"], "both.cu": ["90a", "100a"]}
    ninja(project, "-j1")
    (library,) = (project / "build").glob("_cuda*.so")
    spec = importlib.util.spec_from_file_location("_cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # no driver is needed to load it
    with pytest.raises(ValueError, match="fill: invalid argument"):
        module.wrong()
    with pytest.raises(ValueError, match=r"fill: operation not supported.*no code for this kind of GPU"):
        module.elsewhere()
