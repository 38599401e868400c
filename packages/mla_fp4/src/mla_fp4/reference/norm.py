"""RMSNorm and rotary embedding."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; `weight=None` leaves x as it is."""
    if weight is None:
        return x
    return x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * weight


def rotate(x: torch.Tensor, rope: torch.Tensor | None, inverse: bool = False) -> torch.Tensor:
    """Rotate adjacent pairs of the last `rope.shape[1]` channels of x [T, ..., D]; `rope=None` leaves x as it is."""
    if rope is None:
        return x
    half = rope.shape[1] // 2
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = rope[:, :half].view(shape), rope[:, half:].view(shape)
    if inverse:
        sin = -sin
    kept, turned = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    a, b = turned[..., 0::2], turned[..., 1::2]
    return torch.cat([kept, torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)], dim=-1)


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, rope: torch.Tensor | None, *, inverse: bool = False
) -> torch.Tensor:
    """RMSNorm, then rotation: see `mla_fp4.norm_rope`."""
    return rotate(rms_norm(x, weight, eps), rope, inverse)
