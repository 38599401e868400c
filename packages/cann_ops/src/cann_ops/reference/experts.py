"""Router and experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cann_ops.reference.rows import split_window
from kernel_core import formats


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + e^x)); below 0 as e^(x/2) sqrt(log1p(z) / z), z = e^x, which does not underflow early."""
    z = torch.exp(-logits.abs())
    ratio = torch.where(z > 1e-6, torch.log1p(z) / z, 1 - z / 2)
    ratio = torch.where(logits.isnan(), logits, ratio)
    return torch.where(logits < 0, torch.exp(logits / 2) * ratio.sqrt(), (logits.abs() + torch.log1p(z)).sqrt())


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    bias_vl: torch.Tensor | None = None,
    is_image: torch.Tensor | None = None,
    routed_scale: float = 1.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cann_ops.route`."""
    score = sqrt_softplus(logits)
    push = bias if bias_vl is None or is_image is None else torch.where(is_image[:, None], bias_vl, bias)
    biased = (score + push).nan_to_num(nan=-float("inf"), posinf=float("inf"), neginf=-float("inf"))
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    picked = score.gather(1, ids)
    return ids.int(), picked / (picked.sum(-1, keepdim=True) + 1e-20) * routed_scale


def swiglu(gate_up: torch.Tensor, weights: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) · weight of rows [n, gate then up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weights[:, None]


def swiglu_quantize(
    gate_up: torch.Tensor, weights: torch.Tensor, *, limit: float = 10.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cann_ops.swiglu_quantize`."""
    return split_window(formats.quantize_window(swiglu(gate_up, weights, limit)))


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 of E4M3 codes with a UE8M0 scale for 32 values."""
    return formats.dequantize_fp8_rows(codes, scales)


def mx_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    first: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
) -> torch.Tensor:
    """See `cann_ops.mx_linear`; rows that belong to no expert are zeros."""
    x = dequantize_rows(codes, scales)
    packed = weight.dtype == torch.uint8
    wide = (formats.dequantize_mxfp4 if packed else formats.dequantize_fp8_rows)(weight, weight_scales)
    out = x.new_zeros(len(x), weight.shape[1])
    for e in range(len(weight)):
        rows = slice(int(first[e]), int(first[e + 1]))
        out[rows] = x[rows] @ wide[e].T
    return out
