"""Dense products of the model, in one of two ways.

`fixed`: our kernel on the packed weights; its tile does not depend on the number of rows, so a row's result is
bitwise the same alone and in any batch. `library`: PyTorch's product on a float32 copy; faster for some shapes, and
free to choose another algorithm for another number of rows. On a GPU both are PyTorch's (dense_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

import mega_moe
from orchestrator.model import dense_gpu
from orchestrator.model.weights import Linear

DenseMode = Literal["fixed", "library"]
Product = Callable[[torch.Tensor], torch.Tensor]


def dense(weight: Linear | torch.Tensor, mode: DenseMode) -> Product:
    """x float32 [T, in] -> float32 [T, out]."""
    if isinstance(weight, torch.Tensor):
        weight = Linear(weight, None)
    if _on_gpu(weight):
        return dense_gpu.product(_narrow(weight), mode)
    if mode == "fixed":
        matrix, scale = weight.weight, weight.scale
        return lambda x: mega_moe.linear(x, matrix, scale)
    copy = expand(weight)
    return lambda x: torch.nn.functional.linear(x, copy)


def grouped(weight: Linear, groups: int, mode: DenseMode) -> Product:
    """x float32 [T, groups, in] -> float32 [T, groups, out / groups]; weight rows are group after group."""
    if _on_gpu(weight):
        return dense_gpu.grouped_product(_narrow(weight), groups, mode)
    if mode == "fixed":
        matrix, scale = weight.weight, weight.scale
        return lambda x: mega_moe.grouped_linear(x, matrix, scale)
    copy = expand(weight)
    copy = copy.view(groups, -1, copy.shape[1])
    return lambda x: torch.einsum("tgi,goi->tgo", x, copy).contiguous()


def _on_gpu(weight: Linear) -> bool:
    return weight.weight.is_cuda and weight.weight.dtype is not torch.float32


def _narrow(weight: Linear) -> torch.Tensor:
    """bfloat16 copy of a weight that is not float32; exact down to bfloat16's smallest numbers."""
    return weight.weight if weight.scale is None else expand(weight).bfloat16()


def expand(weight: Linear) -> torch.Tensor:
    """float32 copy of a weight; exact, since every stored value is a float32 value."""
    if weight.scale is None:
        return weight.weight.float()
    from kernel_core import formats

    return formats.dequantize_fp8_block(weight.weight, weight.scale)
