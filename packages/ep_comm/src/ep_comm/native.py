"""The compiled CPU module, registered so that `kernel_core.limit_isa` reaches it."""

from __future__ import annotations

from typing import Any

import ep_comm._native as _native
import kernel_core
from ep_comm.shape import Shape

native = kernel_core.register_native(_native)

_FORMATS = {"float32": 0, "bfloat16": 1, "fp8": 2}


def native_shape(shape: Shape) -> Any:
    return native.Shape(
        shape.ranks,
        shape.max_tokens,
        shape.hidden,
        shape.top_k,
        shape.experts,
        _FORMATS[shape.dispatch],
        _FORMATS[shape.combine],
    )
