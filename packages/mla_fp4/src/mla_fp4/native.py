"""The compiled module, made to answer to `kernel_core.limit_isa`."""

from __future__ import annotations

import mla_fp4._native as _native
from kernel_core import register_native

native = register_native(_native)
