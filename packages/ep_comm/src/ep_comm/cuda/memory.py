"""Regions: device memory of a rank, and tensors over parts of it."""

from __future__ import annotations

from typing import Any

import torch

from ep_comm.shape import GROUP, Shape

FORMATS = {"float32": 0, "bfloat16": 1, "fp8": 2}


class _Raw:
    """Device memory that PyTorch did not allocate."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_at(address: int, size: int) -> torch.Tensor:
    """uint8 [size] over device memory that outlives it; on the GPU that CUDA says the address belongs to."""
    tensor = torch.as_tensor(_Raw(address, size))
    if tensor.data_ptr() != address:
        raise RuntimeError(f"address: PyTorch gives no tensor over {address:#x}, only a copy of it")
    return tensor


def native_shape(module: Any, shape: Shape) -> Any:
    return module.Shape(
        ranks=shape.ranks,
        max_tokens=shape.max_tokens,
        hidden=shape.hidden,
        top_k=shape.top_k,
        experts=shape.experts,
        dispatch=FORMATS[shape.dispatch],
        combine=FORMATS[shape.combine],
    )


class FixedRows:
    """The tensors of a fixed dispatch, in place: the next dispatch of the communicator writes them again."""

    def __init__(self, memory: torch.Tensor, offsets: dict[str, int], shape: Shape) -> None:
        rows = shape.ranks * shape.max_tokens
        groups = shape.hidden // GROUP if shape.dispatch == "fp8" else 0

        def part(name: str, dtype: torch.dtype, width: int) -> torch.Tensor:
            begin = offsets[name]
            return memory[begin : begin + rows * width * dtype.itemsize].view(dtype).view(rows, width)

        self.x = part("x", shape.dispatch_dtype, shape.hidden)
        self.scales = part("scales", torch.float32, groups) if groups else None
        self.ids = part("ids", torch.int32, shape.top_k)
        self.weights = part("weights", torch.float32, shape.top_k)
        self.sources = part("sources", torch.int32, 1).view(rows)
