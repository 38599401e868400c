"""Element-wise chains as one kernel: `torch.compile` on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

_RECOMPILES = 256  # shapes differ by phase, layer kind and chunk


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for static shapes at its first call with CUDA tensors; on a CPU call it as it is.

    FATHOM_TRAIN_EAGER=1 switches compilation off, to look for a fault.
    """
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        first = next(a for a in args if isinstance(a, torch.Tensor))
        if not first.is_cuda or os.environ.get("FATHOM_TRAIN_EAGER"):
            return function(*args)
        if not compiled:
            torch._dynamo.config.cache_size_limit = _RECOMPILES
            compiled.append(torch.compile(function, dynamic=False, fullgraph=True))
        return compiled[0](*args)

    return call
