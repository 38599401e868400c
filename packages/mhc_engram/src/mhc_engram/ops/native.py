"""The compiled module."""

from kernel_core import register_native
from mhc_engram import _native  # type: ignore[attr-defined]

native = register_native(_native)
