"""The compiled CPU module, registered so that `kernel_core.limit_isa` reaches it."""

from __future__ import annotations

import gdr_swapin._native as _native
import kernel_core

native = kernel_core.register_native(_native)
