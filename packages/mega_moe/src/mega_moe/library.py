"""The ops in PyTorch's operators, on any device and without reading a value back, so that a CUDA graph can hold them.

What a GPU runs as long as there are no kernels: weights are expanded to float32 at each call. Products are those of
PyTorch's library, so unlike on a CPU a row's bits may depend on how many rows it comes with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernel_core import formats
from mega_moe.weights import SharedExpert

_EXPANDED = 1 << 26  # float32 weights of experts that are held at once


def expand(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A float8_e4m3fn (with 32 x 32 block scales), bfloat16 or float32 matrix as float32; exact."""
    return weight.float() if scale is None else formats.dequantize_fp8_block(weight, scale)


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """`mega_moe.linear`."""
    return F.linear(x, expand(weight, scale))


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """`mega_moe.grouped_linear`."""
    parts = expand(weight, scale).unflatten(0, (x.shape[1], -1))
    return torch.bmm(x.transpose(0, 1), parts.transpose(1, 2)).transpose(0, 1)


def linear_split(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`mega_moe.linear` for many rows, by one bfloat16 product of three times as many with float32 sums.

    x is a sum of three bfloat16 numbers and the weight, of whole 32 x 32 blocks, is one, so that the error is that of a
    float32 product, but for weights below 2^-126.
    """
    (rows, columns), block = weight.shape, 32
    factors = formats.decode_ue8m0(scale).bfloat16().view(rows // block, 1, columns // block, 1)
    matrix = (weight.bfloat16().view(rows // block, block, columns // block, block) * factors).view(rows, columns)
    terms = []
    for _ in range(3):
        terms.append(x.bfloat16())
        high = terms[-1].float()
        x = torch.where(high.isfinite(), x - high, 0.0)
    stacked = torch.cat(terms[::-1])
    if stacked.is_cuda:
        parts = torch.mm(stacked, matrix.T, out_dtype=torch.float32)
    else:
        parts = stacked.float() @ matrix.T.float()
    low, middle, high = parts.chunk(3)
    return (low + middle) + high


def fused_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    *,
    limit: float,
    shared: SharedExpert | None,
) -> torch.Tensor:
    """`mega_moe.fused_experts`. Few rows expand the experts that they chose, many rows all experts once."""
    chosen = _few if ids.numel() <= w13.shape[0] else _many
    parts = chosen(x, ids, weights, w13, s13, w2, s2, limit)
    out = torch.zeros_like(x)
    for slot in range(ids.shape[1]):  # one after the other, as the sum's order is defined
        out = out + parts[:, slot]
    if shared is not None:
        full13, full2 = expand(shared.w13, shared.s13), expand(shared.w2, shared.s2)
        out = out + F.linear(_gated(F.linear(x, full13), limit), full2)
    return out


def _gated(both: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _few(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """float32 [T, k, d]: what each slot adds, zeros where it is empty."""
    tokens, slots = ids.shape
    expert = ids.flatten().long().clamp(0, w13.shape[0] - 1)
    full13 = formats.dequantize_mxfp4(w13[expert], s13[expert])
    full2 = formats.dequantize_mxfp4(w2[expert], s2[expert])
    rows = x.repeat_interleave(slots, dim=0).unsqueeze(1)
    hidden = _gated(torch.bmm(rows, full13.transpose(1, 2)), limit) * weights.view(-1, 1, 1)
    parts = torch.bmm(hidden, full2.transpose(1, 2)).view(tokens, slots, x.shape[1])
    return torch.where((ids >= 0).unsqueeze(-1), parts, 0.0)


def _many(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """As `_few`, every expert over every row, some experts at a time."""
    count, rows, _ = w13.shape
    parts = x.new_zeros(*ids.shape, x.shape[1])
    step = max(1, _EXPANDED // (rows * x.shape[1] * 3 // 2))
    for first in range(0, count, step):
        some = slice(first, min(first + step, count))
        full13 = formats.dequantize_mxfp4(w13[some], s13[some])
        full2 = formats.dequantize_mxfp4(w2[some], s2[some])
        hidden = _gated(torch.matmul(x, full13.transpose(1, 2)), limit)  # [experts, T, I]
        made = torch.bmm(hidden, full2.transpose(1, 2)).transpose(0, 1)  # [T, experts, d]
        here = (ids >= some.start) & (ids < some.stop)
        place = (ids.long() - some.start).clamp(0, some.stop - some.start - 1)
        mine = made.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[1]))
        parts = torch.where(here.unsqueeze(-1), mine * weights.unsqueeze(-1), parts)
    return parts
