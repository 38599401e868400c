"""The compiled CPU module, known to `kernel_core.limit_isa`."""

from __future__ import annotations

import dspark_kernels._native as _compiled
from kernel_core import register_native

native = register_native(_compiled)
