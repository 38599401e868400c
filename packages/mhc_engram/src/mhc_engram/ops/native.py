"""The compiled module."""

from kernel_core import register_native
from mhc_engram import _native

native = register_native(_native)
