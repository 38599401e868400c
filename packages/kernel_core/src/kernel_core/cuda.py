"""What the packages share on their way to CUDA C++ kernels: loading, streams, workspaces and argument checks.

Nothing here waits for a device or reads from it, so that a CUDA graph can hold every op that is built on it.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch


@cache
def cuda_module(package: str) -> Any:
    """A package's compiled CUDA module; RuntimeError says what to do where there is none."""
    try:
        return importlib.import_module(f"{package}._cuda")
    except ImportError as error:
        raise RuntimeError(
            f"{package} was built without its CUDA kernels, or they do not load ({error}); build it again with "
            f"`pip install ./packages/{package} -Ccmake.define.FATHOM_CUDA=ON`, which needs nvcc 13 or later"
        ) from error


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def stream(device: torch.device) -> int:
    """PyTorch's current stream of a GPU as a number. The GPU has to be the current one: kernels start there."""
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise ValueError(f"device: got tensors on {device}, allowed is the current one, cuda:{current}")
    return int(torch.cuda.current_stream(device).cuda_stream)


def workspace(size: int, device: torch.device) -> torch.Tensor:
    """Scratch memory of `size` bytes, 16-byte aligned, from PyTorch's allocator; at least one byte."""
    return torch.empty(max(1, size), dtype=torch.uint8, device=device)


def pointer(value: torch.Tensor | None) -> int:
    """Address of a tensor's first element, 0 for None."""
    return 0 if value is None else value.data_ptr()


def aligned(*values: torch.Tensor | None) -> bool:
    """Whether all start at a multiple of 16 bytes, as kernels that read 16 bytes at once need it."""
    return all(value is None or value.data_ptr() % 16 == 0 for value in values)


def same_device(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError for the first argument that is not on the device of `first`: a kernel would read wild memory."""
    device = first.device
    for name, value in others.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name}: got a tensor on {value.device}, allowed is {device}")
