"""From real-valued weights to the tensors that store them."""

from __future__ import annotations

import torch

from kernel_core.check import require
from kernel_core.native_formats import quantize_fp8_block, quantize_fp8_rows, quantize_mxfp4
from orchestrator.model.checkpoint.specs import Stored


def encode(stored: Stored, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise or round `values` (float, of `stored.shape`) into named tensors; scales and FP4 codes as uint8.

    Raises `ValueError` for another shape or values that are not finite.
    """
    require(tuple(values.shape) == stored.shape, stored.name, f"shape {list(values.shape)}", f"{list(stored.shape)}")
    require(bool(torch.isfinite(values).all()), stored.name, "NaN or infinite values", "finite values")
    if stored.storage == "bf16":
        return {stored.name: values.to(torch.bfloat16)}
    if stored.storage == "f32":
        return {stored.name: values.to(torch.float32)}
    quantise = {"fp8": quantize_fp8_block, "fp4": quantize_mxfp4, "table": quantize_fp8_rows}[stored.storage]
    weight, scale = quantise(values.to(torch.float32))
    return {f"{stored.name}.weight": weight, f"{stored.name}.scale": scale}
