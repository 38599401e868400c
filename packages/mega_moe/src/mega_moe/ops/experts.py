"""Routed and shared experts in one call."""

from __future__ import annotations

import torch

import kernel_core
from kernel_core import check
from mega_moe import reference
from mega_moe.native import native
from mega_moe.weights import SharedExpert


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
    """
    check.tensor("x", x, dtype=torch.float32, shape=(None, None))
    tokens, d = x.shape
    check.tensor("ids", ids, dtype=torch.int32, shape=(tokens, None))
    top_k = ids.shape[1]
    check.tensor("weights", weights, dtype=torch.float32, shape=(tokens, top_k))
    check.tensor("w13", w13, dtype=torch.uint8, shape=(None, None, d // 2))
    experts, rows, _ = w13.shape
    inter = rows // 2
    check.require(d > 0 and d % 32 == 0, "x", f"{d} columns", "a positive multiple of 32")
    check.require(inter > 0 and rows % 64 == 0, "w13", f"{rows} rows", "a positive multiple of 64")
    check.tensor("s13", s13, dtype=torch.uint8, shape=(experts, rows, d // 32))
    check.tensor("w2", w2, dtype=torch.uint8, shape=(experts, d, inter // 2))
    check.tensor("s2", s2, dtype=torch.uint8, shape=(experts, d, inter // 32))
    shared_arguments = (0, 0, 0, 0, 0) if shared is None else _shared(shared, d)
    check.require(limit > 0, "limit", limit, "a positive number")
    if out is None:
        out = torch.empty((tokens, d), device=x.device)
    else:
        check.tensor("out", out, dtype=torch.float32, shape=(tokens, d))
    if kernel_core.use_reference():
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (-1, -1)
        check.require(low >= -1 and high < experts, "ids", f"{low} to {high}", f"-1 or an expert below {experts}")
        return out.copy_(reference.fused_experts(x, ids, weights, w13, s13, w2, s2, limit=limit, shared=shared))
    if x.device.type != "cpu":
        raise kernel_core.unsupported("mega_moe.fused_experts", x, "cpu")
    native.fused_experts(
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        tokens,
        top_k,
        d,
        inter,
        experts,
        w13.data_ptr(),
        s13.data_ptr(),
        w2.data_ptr(),
        s2.data_ptr(),
        *shared_arguments,
        limit,
    )
    return out


def _shared(shared: SharedExpert, d: int) -> tuple[int, int, int, int, int]:
    check.tensor("shared.w13", shared.w13, dtype=torch.float8_e4m3fn, shape=(None, d))
    rows = shared.w13.shape[0]
    inter = rows // 2
    check.require(inter > 0 and rows % 64 == 0, "shared.w13", f"{rows} rows", "a positive multiple of 64")
    check.tensor("shared.s13", shared.s13, dtype=torch.uint8, shape=(rows // 32, d // 32))
    check.tensor("shared.w2", shared.w2, dtype=torch.float8_e4m3fn, shape=(d, inter))
    check.tensor("shared.s2", shared.s2, dtype=torch.uint8, shape=(d // 32, inter // 32))
    return (inter, shared.w13.data_ptr(), shared.s13.data_ptr(), shared.w2.data_ptr(), shared.s2.data_ptr())


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
