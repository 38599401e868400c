"""Router, products with MX weights, and the experts made of them."""

from __future__ import annotations

from typing import Protocol

import torch

from cann_ops.kernels import Kernel
from cann_ops.launch import launch, place
from cann_ops.ops.rows import norm_quantize
from cann_ops.reference import experts as reference
from kernel_core import check

_F32, _I32, _U8, _F8 = torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn
_TILES = (16, 32, 64, 128)


class Shared(Protocol):
    """`mega_moe.SharedExpert`: E4M3 w13 [2 I, d] and w2 [d, I], UE8M0 s13 and s2 for blocks of 32 x 32."""

    @property
    def w13(self) -> torch.Tensor: ...
    @property
    def s13(self) -> torch.Tensor: ...
    @property
    def w2(self) -> torch.Tensor: ...
    @property
    def s2(self) -> torch.Tensor: ...


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    bias_vl: torch.Tensor | None = None,
    is_image: torch.Tensor | None = None,
    routed_scale: float = 1.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each token by sqrt(softplus(logit)) + bias, and their weights.

    logits: float32 [T, E], E up to 1024; bias, bias_vl: float32 [E]; is_image: bool [T]; top_k: 1 to 32. Meaning, ties
    and NaN as in `mega_moe.route`. Returns ids int32 [T, top_k] and weights float32 [T, top_k]. Raises ValueError and
    CannUnavailableError as `cann_ops.kv_rows`.
    """
    check.tensor("logits", logits, dtype=_F32, shape=(None, None))
    tokens, experts = logits.shape
    check.require(1 <= experts <= 1024, "logits", f"{experts} experts", "1 to 1024")
    check.tensor("bias", bias, dtype=_F32, shape=(experts,))
    check.require(1 <= top_k <= min(experts, 32), "top_k", top_k, f"1 to {min(experts, 32)}")
    image = bias_vl is not None and is_image is not None
    check.require(image or (bias_vl is None and is_image is None), "bias_vl, is_image", "one of them", "both or none")
    if bias_vl is not None and is_image is not None:
        check.tensor("bias_vl", bias_vl, dtype=_F32, shape=(experts,))
        check.tensor("is_image", is_image, dtype=torch.bool, shape=(tokens,))
    if place("cann_ops.route", logits) == "reference":
        return reference.route(logits, bias, top_k, bias_vl=bias_vl, is_image=is_image, routed_scale=routed_scale)
    ids, weights = logits.new_empty(tokens, top_k, dtype=_I32), logits.new_empty(tokens, top_k)
    if tokens:
        both = torch.stack((bias, bias if bias_vl is None else bias_vl))
        given = {"logits": logits, "bias": both, "ids": ids, "weights": weights}
        if is_image is not None:
            given["is_image"] = is_image.int()
        kernel = Kernel.of("route", experts=experts, top_k=top_k, image=image)
        launch(kernel, given, written=["ids", "weights"], scalars={"routed_scale": routed_scale})
    return ids, weights


def swiglu_quantize(
    gate_up: torch.Tensor, weights: torch.Tensor, *, limit: float = 10.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(min(g, limit)) · clamp(u, ±limit) · weight of rows (g, u), quantised to MXFP8.

    gate_up: float32 [n, 2 I], I a multiple of 128 up to 4096; weights: float32 [n]. Returns codes float8_e4m3fn [n, I]
    and scales uint8 [n, I / 32]. Raises ValueError and CannUnavailableError as `cann_ops.kv_rows`.
    """
    check.tensor("gate_up", gate_up, dtype=_F32, shape=(None, None))
    rows, width = gate_up.shape
    inter = width // 2
    check.require(width % 256 == 0 and 256 <= width <= 8192, "gate_up", f"{width} columns", "twice 128 to 4096, by 256")
    check.tensor("weights", weights, dtype=_F32, shape=(rows,))
    check.require(limit > 0, "limit", limit, "a positive number")
    if place("cann_ops.swiglu_quantize", gate_up) == "reference":
        return reference.swiglu_quantize(gate_up, weights, limit=limit)
    codes, scales = gate_up.new_empty(rows, inter, dtype=_U8), gate_up.new_empty(rows, inter // 32, dtype=_U8)
    if rows:
        given = {"gate_up": gate_up, "weights": weights, "codes": codes, "scales": scales}
        kernel = Kernel.of("swiglu_quantize", inter=inter)
        launch(kernel, given, written=["codes", "scales"], scalars={"limit": limit})
    return codes.view(_F8), scales


def mx_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    first: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
) -> torch.Tensor:
    """Rows times the transposed weight of their expert, block-scaled.

    Args:
        codes, scales: float8_e4m3fn [n, K] and uint8 [n, K / 32], rows in the order of their experts.
        first: int32 [E + 1]; rows first[e] to first[e + 1] - 1 belong to expert e. Rows behind the last have zeros.
        weight: uint8 [E, N, K / 2] (E2M1 pairs) or float8_e4m3fn [E, N, K]; weight_scales: uint8 [E, N, K / 32].
            N is a multiple of 128, K of 256.

    Returns:
        float32 [n, N]. Products are exact; a row's bits do not depend on other rows.

    Raises ValueError and CannUnavailableError as `cann_ops.kv_rows`. What stands in `first` is not looked at.
    """
    check.tensor("codes", codes, dtype=_F8, shape=(None, None))
    n, k = codes.shape
    check.require(k > 0 and k % 256 == 0, "codes", f"{k} columns", "a positive multiple of 256")
    check.tensor("scales", scales, dtype=_U8, shape=(n, k // 32))
    check.tensor("weight", weight, dtype=(_U8, _F8), shape=(None, None, None))
    packed = weight.dtype == _U8
    experts, columns, _ = weight.shape
    check.tensor("weight", weight, dtype=(_U8, _F8), shape=(experts, columns, k // 2 if packed else k))
    check.require(columns > 0 and columns % 128 == 0, "weight", f"{columns} rows", "a positive multiple of 128")
    check.tensor("weight_scales", weight_scales, dtype=_U8, shape=(experts, columns, k // 32))
    check.tensor("first", first, dtype=_I32, shape=(experts + 1,))
    if place("cann_ops.mx_linear", codes) == "reference":
        return reference.mx_linear(codes, scales, first, weight, weight_scales)
    y = codes.new_zeros(n, columns, dtype=_F32)
    if n and experts:
        rows = next((tile for tile in _TILES if tile * experts >= n), _TILES[-1])
        given = {
            "x_codes": codes,
            "x_scales": scales.view(torch.int16),
            "first": first,
            "codes" if packed else "wide": weight,
            "scales": weight_scales.view(torch.int16),
            "y": y,
        }
        launch(Kernel.of("mx_linear", rows=rows, N=columns, K=k, e2m1=packed), given, written=[])
    return y


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
    shared: Shared | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of `W2 (silu(g) · u · weight)`, on MXFP4 weights as stored.

    Arguments and meaning as in `mega_moe.fused_experts`, d is a multiple of 1024, I and the shared width of 256.
    It is a chain of four launches, and three more for a shared expert; x and the gated rows are rounded to MXFP8 on the
    way, as the cube multiplies E4M3 by E4M3, and results differ from the float32 ones by that rounding. Slots are added
    in their order, then the shared expert, so a row's bits depend on that row alone.

    Returns float32 [T, d]. Raises ValueError and CannUnavailableError as `cann_ops.kv_rows`; ids are not looked at, and
    one outside of 0 to E - 1 is an empty slot.
    """
    check.tensor("x", x, dtype=_F32, shape=(None, None))
    tokens, d = x.shape
    check.tensor("ids", ids, dtype=_I32, shape=(tokens, None))
    slots = ids.shape[1]
    check.tensor("weights", weights, dtype=_F32, shape=(tokens, slots))
    check.tensor("w13", w13, dtype=_U8, shape=(None, None, d // 2))
    experts, twice, _ = w13.shape
    check.require(twice > 0 and twice % 512 == 0, "w13", f"{twice} rows", "twice a positive multiple of 256")
    check.tensor("s13", s13, dtype=_U8, shape=(experts, twice, d // 32))
    check.tensor("w2", w2, dtype=_U8, shape=(experts, d, twice // 4))
    check.tensor("s2", s2, dtype=_U8, shape=(experts, d, twice // 64))
    check.require(limit > 0, "limit", limit, "a positive number")
    if shared is not None:
        check.tensor("shared.w2", shared.w2, dtype=_F8, shape=(d, None))
        inter = shared.w2.shape[1]
        check.require(inter > 0 and inter % 256 == 0, "shared.w2", f"{inter} columns", "a positive multiple of 256")
        check.tensor("shared.w13", shared.w13, dtype=_F8, shape=(2 * inter, d))
        check.tensor("shared.s13", shared.s13, dtype=_U8, shape=(2 * inter // 32, d // 32))
        check.tensor("shared.s2", shared.s2, dtype=_U8, shape=(d // 32, inter // 32))
    place("cann_ops.fused_experts", x)
    if tokens == 0:
        return torch.zeros_like(x)
    codes, scales = norm_quantize(x, None)
    if slots == 0 or experts == 0:
        return torch.zeros_like(x) if shared is None else _shared(codes, scales, shared, limit)
    expert = torch.where((ids < 0) | (ids >= experts), experts, ids).flatten().long()
    order = expert.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=x.device).scatter_add_(
        0, expert, torch.ones_like(expert)
    )
    first = torch.cat((counts.new_zeros(1), counts[:experts].cumsum(0))).int()
    token = order // slots
    rows = codes.view(_U8)[token].view(_F8)
    gate_up = mx_linear(rows, scales[token], first, w13, s13)
    hidden, hidden_scales = swiglu_quantize(gate_up, weights.flatten()[order].contiguous(), limit=limit)
    parts = torch.empty(tokens * slots, d, device=x.device)
    parts[order] = mx_linear(hidden, hidden_scales, first, w2, s2)
    out = torch.zeros_like(x)
    for part in parts.view(tokens, slots, d).unbind(1):
        out += part
    return out if shared is None else out.add_(_shared(codes, scales, shared, limit))


def _shared(codes: torch.Tensor, scales: torch.Tensor, shared: Shared, limit: float) -> torch.Tensor:
    """The expert that every token passes, with weight 1. A scale stands for 32 rows; the cube wants one a row."""
    tokens = len(codes)
    first = torch.arange(2, dtype=_I32, device=codes.device) * tokens
    spread13, spread2 = (s.repeat_interleave(32, 0).unsqueeze(0) for s in (shared.s13, shared.s2))
    gate_up = mx_linear(codes, scales, first, shared.w13.unsqueeze(0), spread13)
    hidden, hidden_scales = swiglu_quantize(gate_up, gate_up.new_ones(tokens), limit=limit)
    return mx_linear(hidden, hidden_scales, first, shared.w2.unsqueeze(0), spread2)
