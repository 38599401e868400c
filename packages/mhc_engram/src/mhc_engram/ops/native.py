"""The compiled module."""

import mhc_engram._native as _native
from kernel_core import register_native

native = register_native(_native)
