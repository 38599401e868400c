"""The ops on an NVIDIA GPU: tensors to the pointers and sizes of the compiled module."""

from __future__ import annotations

from functools import cache

import torch

_CODE = ((9, 0), (10, 0))  # capabilities that the module has machine code for


@cache
def has_code(device: torch.device) -> bool:
    """Whether the kernels run on a device; others take PyTorch's operators. True for what is no GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _CODE
