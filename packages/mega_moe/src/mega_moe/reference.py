"""What the ops mean, in plain float32 PyTorch: weights are dequantised, then multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mega_moe.weights import SharedExpert

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes to float32: 2^(b - 127), with b = 0 the subnormal 2^-127 and b = 255 NaN."""
    value = (scale.to(torch.int32) << 23).view(torch.float32)
    return value.masked_fill(scale == 0, 2.0**-127).masked_fill(scale == 255, float("nan"))


def dequantize_mxfp4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [..., o, i/2] and uint8 [..., o, i/32] to float32 [..., o, i]; the even element is the low nibble."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    values = _E2M1[nibbles.to(torch.int32)]
    return (values.unflatten(-1, (-1, 32)) * decode_scale(scale).unsqueeze(-1)).flatten(-2)


def dequantize(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A float8_e4m3fn (with 32 x 32 block scales), bfloat16 or float32 matrix as float32."""
    value = weight.to(torch.float32)
    if scale is None:
        return value
    rows, columns = weight.shape
    grid = decode_scale(scale).repeat_interleave(32, dim=0)[:rows].repeat_interleave(32, dim=1)[:, :columns]
    return value * grid


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, i] times weight [o, i] transposed, float32."""
    return F.linear(x, dequantize(weight, scale))


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, G, i]; group g meets rows [g*o, (g+1)*o) of weight; float32 [T, G, o]."""
    groups = x.shape[1]
    return torch.einsum("tgi,goi->tgo", x, dequantize(weight, scale).unflatten(0, (groups, -1)))


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + e^x)); for negative x as e^(x/2) sqrt(log1p(z)/z), z = e^x, which does not underflow early."""
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
    """Expert ids by descending biased score and their weights; see `mega_moe.route`."""
    score = sqrt_softplus(logits)
    chosen_bias = bias.expand_as(score)
    if bias_vl is not None and is_image is not None:
        chosen_bias = torch.where(is_image[:, None], bias_vl, bias)
    biased = (score + chosen_bias).nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    picked = score.gather(1, ids)
    return ids.to(torch.int32), picked / (picked.sum(-1, keepdim=True) + 1e-20) * routed_scale


def _expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weight: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = F.linear(x, w13).chunk(2, dim=-1)
    hidden = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight[:, None]
    return F.linear(hidden, w2)


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
) -> torch.Tensor:
    """Sum over a token's experts of W2(silu(min(W1 x, limit)) * clamp(W3 x) * weight); see `mega_moe.fused_experts`."""
    tokens, slots = ids.shape
    parts = x.new_zeros(tokens, slots, x.shape[1])
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, slot = torch.where(ids == expert)
        full13 = dequantize_mxfp4(w13[expert], s13[expert])
        full2 = dequantize_mxfp4(w2[expert], s2[expert])
        parts[token, slot] = _expert(x[token], full13, full2, weights[token, slot], limit)
    out = x.new_zeros(x.shape)
    for part in parts.unbind(1):  # one after the other, as the sum's order is defined
        out += part
    if shared is not None:
        ones = x.new_ones(tokens)
        full13, full2 = dequantize(shared.w13, shared.s13), dequantize(shared.w2, shared.s2)
        out += _expert(x, full13, full2, ones, limit)
    return out
