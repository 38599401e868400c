"""Routed and shared experts in one call."""

from __future__ import annotations

import torch

import kernel_core
from kernel_core import check
from mega_moe import library, reference
from mega_moe.cuda import experts as cuda_experts
from mega_moe.cuda.layout import PackedExperts
from mega_moe.native import native
from mega_moe.weights import SharedExpert

_NOTHING = (0, 0, 0, 0, 0)


def fused_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    *,
    limit: float = 10.0,
    shared: SharedExpert | None = None,
    out: torch.Tensor | None = None,
    packed: PackedExperts | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of `W2 (silu(g) * u * weight)`, on MXFP4 weights as stored.

    g = min(W1 x, limit) and u = clamp(W3 x, -limit, limit): the gate is clamped from above only.

    x: float32 [T, d]; ids: int32 [T, k], -1 for an empty slot; weights: float32 [T, k].
    w13: uint8 [E, 2I, d/2], E2M1 pairs (even column in the low nibble), W1 (gate) rows then W3 (up) rows;
    s13: uint8 [E, 2I, d/32], UE8M0 for each row and 32 columns; w2: uint8 [E, d, I/2]; s2: uint8 [E, d, I/32].
    shared: an FP8 expert added to every token with weight 1. d, I and the shared width are multiples of 32.
    out: float32 [T, d], optional, must not overlap the inputs.
    Returns float32 [T, d]: slots are added in their order, then the shared expert, in float32. A row does not
    depend on other rows, on its place, or on the thread count. Rows without experts are zero.
    Raises ValueError for wrong shapes, dtypes, strides or an id outside [-1, E), before anything is written.
    packed: the same weights and shared expert by `mega_moe.cuda.layout.pack_experts`, for the kernels of SM90. They
    round x and the gated rows to bfloat16 and sum in float32; a row's bits are its own. Without it, and on other
    NVIDIA GPUs, PyTorch's operators run, and a row may depend on how many rows it comes with. On a GPU ids are not
    checked, as that would wait for the device: a foreign id is an empty slot for the kernels.
    """
    # One cheap test for every call of every layer, and the full checks only where it fails.
    if not _plain(x, ids, weights, w13, s13, w2, s2, limit, shared, out):
        _explain(x, ids, weights, w13, s13, w2, s2, limit, shared, out)
    tokens, d = x.shape
    experts, rows, _ = w13.shape
    given = out
    if out is None:
        out = torch.empty((tokens, d)) if x.is_cpu else torch.empty((tokens, d), device=x.device)
    if kernel_core.use_reference():
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (-1, -1)
        check.require(low >= -1 and high < experts, "ids", f"{low} to {high}", f"-1 or an expert below {experts}")
        return out.copy_(reference.fused_experts(x, ids, weights, w13, s13, w2, s2, limit=limit, shared=shared))
    if where := kernel_core.elsewhere("mega_moe.fused_experts", x, kernels=packed is not None):
        if where == "cuda" and packed is not None and cuda_experts.fits(packed, x):
            return cuda_experts.fused_experts(x, ids, weights, packed, limit=limit, out=given)
        result = library.fused_experts(x, ids, weights, w13, s13, w2, s2, limit=limit, shared=shared)
        return result if given is None else out.copy_(result)
    native.fused_experts(
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        tokens,
        ids.shape[1],
        d,
        rows // 2,
        experts,
        w13.data_ptr(),
        s13.data_ptr(),
        w2.data_ptr(),
        s2.data_ptr(),
        *(_NOTHING if shared is None else shared.pointers()),
        limit,
    )
    return out


def _plain(x, ids, weights, w13, s13, w2, s2, limit, shared, out) -> bool:
    """Whether all arguments fit together."""
    if x.dim() != 2 or ids.dim() != 2 or w13.dim() != 3:
        return False
    tokens, d = x.shape
    experts, rows, _ = w13.shape
    inter = rows // 2
    for tensor, dtype, shape in (
        (x, torch.float32, x.shape),
        (ids, torch.int32, (tokens, ids.shape[1])),
        (weights, torch.float32, ids.shape),
        (w13, torch.uint8, (experts, rows, d // 2)),
        (s13, torch.uint8, (experts, rows, d // 32)),
        (w2, torch.uint8, (experts, d, inter // 2)),
        (s2, torch.uint8, (experts, d, inter // 32)),
    ):
        if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
            return False
    if d <= 0 or d % 32 or inter <= 0 or rows % 64 or not limit > 0:
        return False
    if shared is not None and shared.w2.shape[0] != d:
        return False
    return out is None or (out.dtype is torch.float32 and out.shape == x.shape and out.is_contiguous())


def _explain(x, ids, weights, w13, s13, w2, s2, limit, shared, out) -> None:
    """Raise for the first argument that is wrong."""
    check.tensor("x", x, dtype=torch.float32, shape=(None, None))
    tokens, d = x.shape
    check.require(d > 0 and d % 32 == 0, "x", f"{d} columns", "a positive multiple of 32")
    check.tensor("ids", ids, dtype=torch.int32, shape=(tokens, None))
    check.tensor("weights", weights, dtype=torch.float32, shape=(tokens, ids.shape[1]))
    check.tensor("w13", w13, dtype=torch.uint8, shape=(None, None, d // 2))
    experts, rows, _ = w13.shape
    inter = rows // 2
    check.require(inter > 0 and rows % 64 == 0, "w13", f"{rows} rows", "a positive multiple of 64")
    check.tensor("s13", s13, dtype=torch.uint8, shape=(experts, rows, d // 32))
    check.tensor("w2", w2, dtype=torch.uint8, shape=(experts, d, inter // 2))
    check.tensor("s2", s2, dtype=torch.uint8, shape=(experts, d, inter // 32))
    check.require(limit > 0, "limit", limit, "a positive number")
    if shared is not None:
        check.tensor("shared.w2", shared.w2, dtype=torch.float8_e4m3fn, shape=(d, None))
    if out is not None:
        check.tensor("out", out, dtype=torch.float32, shape=(tokens, d))


kernel_core.register_op(
    "mega_moe",
    "fused_experts(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor s13, Tensor w2, Tensor s2, "
    "float limit=10.0, Tensor? shared_w13=None, Tensor? shared_s13=None, Tensor? shared_w2=None, "
    "Tensor? shared_s2=None) -> Tensor",
    lambda x, ids, weights, w13, s13, w2, s2, limit=10.0, a=None, b=None, c=None, e=None: fused_experts(
        x, ids, weights, w13, s13, w2, s2, limit=limit, shared=None if a is None else SharedExpert(a, b, c, e)
    ),
    lambda x, *_, **__: torch.empty_like(x),
)
