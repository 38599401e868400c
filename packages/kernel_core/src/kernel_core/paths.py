"""Where the C++ headers and the CMake helper are, for builds outside this repository."""

from __future__ import annotations

from pathlib import Path

_MODULE = Path(__file__).resolve().parent


def _root() -> Path:
    checkout = _MODULE.parents[1]
    return checkout if (checkout / "include" / "kernel_core").is_dir() else _MODULE


def include_dir() -> Path:
    """The folder to put on the include path."""
    return _root() / "include"


def cmake_dir() -> Path:
    """The folder to put on CMAKE_MODULE_PATH; it holds KernelCore.cmake."""
    return _root() / "cmake"
