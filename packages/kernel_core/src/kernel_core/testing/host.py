"""Device arithmetic on the host: KC_HD functions compiled with g++ and called through ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernel_core.paths import include_dir

# As nvcc rounds functions that ask for it: no contraction, no reassociation.
_FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


def host_library(source: Path, folder: Path, *includes: Path) -> ctypes.CDLL:
    """Compile `source` into `folder` and load it; skips the test where g++ is missing.

    Args:
        source: a .cpp file with `extern "C"` functions that includes device headers.
        folder: where the library goes (a temporary folder).
        includes: further include folders; kernel_core's is always there.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run device arithmetic on the host")
    library = folder / f"{source.stem}.so"
    paths = [f"-I{path}" for path in (include_dir(), *includes)]
    done = subprocess.run(
        [compiler, *_FLAGS, *paths, str(source), "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    """A contiguous tensor as the pointer that a host library takes; the caller keeps the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return ctypes.c_void_p(tensor.data_ptr())
