"""What Fathom's kernel packages share: backend choice, number formats, test and benchmark kits.

Names of `backend` are loaded on first use, so that a process which only checks arguments does not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_core.paths import cmake_dir, include_dir

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module("kernel_core.backend"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
