"""The compiled module, registered so that `kernel_core.limit_isa` reaches it."""

from __future__ import annotations

import kernel_core
import mega_moe._native as _native

native = kernel_core.register_native(_native)
