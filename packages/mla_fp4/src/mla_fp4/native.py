"""The compiled module, made to answer to `kernel_core.limit_isa`."""

from __future__ import annotations

from kernel_core import register_native
from mla_fp4 import _native

native = register_native(_native)
