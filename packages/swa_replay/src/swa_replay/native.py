"""The compiled module, answering to `kernel_core.limit_isa`."""

from kernel_core import register_native
from swa_replay import _native

native = register_native(_native)
