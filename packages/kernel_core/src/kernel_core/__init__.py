"""What Fathom's kernel packages share: backend choice, number formats, test and benchmark kits."""

import torch  # noqa: F401  (first, so that one OpenMP runtime is mapped)

import kernel_core._native as _native
from kernel_core.backend import (
    available_isas,
    elsewhere,
    limit_isa,
    register_native,
    register_op,
    unsupported,
    use_reference,
    using,
)
from kernel_core.paths import cmake_dir, include_dir

__all__ = [
    "available_isas",
    "cmake_dir",
    "elsewhere",
    "include_dir",
    "limit_isa",
    "register_native",
    "register_op",
    "unsupported",
    "use_reference",
    "using",
]
__version__ = "0.1.0"

register_native(_native)
