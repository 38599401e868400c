"""RMSNorm and rotary embedding of float32 activations."""

from __future__ import annotations

import torch

import mla_fp4.reference.norm as reference
from kernel_core import check, elsewhere, register_op, use_reference
from mla_fp4.native import native

_F32 = torch.float32


def check_norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, rope: torch.Tensor | None, d: int
) -> None:
    """The checks that ops with a norm and a rotation share."""
    if weight is not None:
        check.tensor("weight", weight, dtype=_F32, shape=(d,))
        check.require(eps > 0, "eps", eps, "a positive number")
    if rope is not None:
        check.tensor("rope", rope, dtype=_F32, shape=(x.shape[0], None))
        rope_dim = rope.shape[1]
        if rope_dim % 2 or rope_dim > d:
            check.require(False, "rope", f"{rope_dim} channels", f"an even number up to {d}")


def norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor | None,
    *,
    inverse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dimension, then RoPE on its last channels.

    Formula: docs/model.md, Rotary angles.

    y = x / sqrt(mean(x²) + eps) · weight in float32. Adjacent pairs (a, b) of the last `rope_dim` channels turn to
    (a·cos - b·sin, a·sin + b·cos); `inverse` turns back. A row of zeros stays zero for every eps > 0. On an NVIDIA GPU
    the kernel takes widths that are multiples of 8 up to 8192; others run in PyTorch's operators.

    Args:
        x: float32 [T, ..., D]; all vectors of one row (the heads of a token) share the row's angles.
        weight: float32 [D], or None for no norm.
        eps: added to the mean square.
        rope: float32 [T, rope_dim], cosines then sines (rope_dim / 2 each), or None for no rotation.
        inverse: rotate by the negative angle.
        out: where to write, shaped like x; may be x itself.

    Returns:
        float32, shaped like x.

    Raises:
        ValueError: a dtype, shape or stride that does not fit.
        NotImplementedError: the tensors' device has no implementation.
    """
    check.tensor("x", x, dtype=_F32)
    if x.dim() < 2:
        check.require(False, "x", f"{x.dim()} dimensions", "at least 2")
    d = x.shape[-1]
    check_norm_rope(x, weight, eps, rope, d)
    if out is not None:
        check.tensor("out", out, dtype=_F32, shape=tuple(x.shape))
    if use_reference():
        result = reference.norm_rope(x, weight, eps, rope, inverse=inverse)
        return result.clone() if out is None else out.copy_(result)
    if path := elsewhere("mla_fp4.norm_rope", x, kernels=True):
        from mla_fp4.cuda import rows as cuda

        if path == "cuda" and cuda.fits_norm_rope(x, weight, rope, out):
            return cuda.norm_rope(x, weight, eps, rope, inverse=inverse, out=out)
        result = reference.norm_rope(x, weight, eps, rope, inverse=inverse)
        return result.clone() if out is None else out.copy_(result)
    if out is None:
        out = torch.empty_like(x)
    rows, size = x.shape[0], x.numel()
    if size:
        native.norm_rope(
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if rope is None else rope.data_ptr(),
            out.data_ptr(),
            rows,
            size // (rows * d),
            d,
            0 if rope is None else rope.shape[1],
            eps,
            inverse,
        )
    return out


register_op(
    "mla_fp4",
    "norm_rope(Tensor x, Tensor? weight, float eps, Tensor? rope, *, bool inverse=False) -> Tensor",
    norm_rope,
    lambda x, weight, eps, rope, *, inverse=False: torch.empty_like(x),
)
