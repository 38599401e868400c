"""What a backbone layer and a draft stage have in common: projections, cache rows, experts, gates of the streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from orchestrator.model.config import ModelConfig
from orchestrator.train.fused import fused
from orchestrator.train.quantise import StraightThrough, index_rows, main_rows, window_rows
from orchestrator.train.streams import Hyper, rms_norm

Weights = dict[str, torch.Tensor]
Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin float32 [T, rd/2]."""


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the adjacent pairs of the last channels of float32 [..., D] by the angles of [..., rd/2]."""
    width = 2 * cos.shape[-1]
    a, b = x[..., -width:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned), -1)


@fused
def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, H, D] by the angles [T, rd/2] of each row."""
    return rotate(x.float(), cos[:, None], sin[:, None]).to(x.dtype)


@fused
def _normed(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x.float(), norm, eps).to(x.dtype)


def normed(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float32, back in x's dtype."""
    return _normed(x, norm, eps)


@fused
def _row(x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float() if norm is None else rms_norm(x.float(), norm, eps)
    return rotate(y, cos, sin)


@fused
def _through_window(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return window_rows(x).to(dtype)


@fused
def _through_main(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return main_rows(x).to(dtype)


@fused
def _through_index(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return index_rows(x).to(dtype)


_THROUGH = {"window": _through_window, "main": _through_main, "index": _through_index}


def stored(x: torch.Tensor, kind: str, dtype: torch.dtype, *, quantised: bool) -> torch.Tensor:
    """Float32 rows as a cache of that kind gives them back; the gradient passes straight through."""
    if not quantised:
        return x.to(dtype)
    return StraightThrough.apply(lambda values: _THROUGH[kind](values, dtype), x)


def cache_row(
    x: torch.Tensor, norm: torch.Tensor | None, rope: Angles, eps: float, kind: str,
    *, quantised: bool,
) -> torch.Tensor:  # fmt: skip
    """Norm (where there is one), rotation, stored format: [T, D] -> [T, D] in x's dtype."""
    return stored(_row(x, norm, *rope, eps), kind, x.dtype, quantised=quantised)


def query(w: Weights, x: torch.Tensor, rope: Angles, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The low-rank state [T, rank] and the rotated queries [T, H, D]."""
    c_q = normed(F.linear(x, w["attn.wq_a"]), w["attn.q_norm.weight"], config.rms_norm_eps)
    q = F.linear(c_q, w["attn.wq_b"]).unflatten(-1, (config.num_attention_heads, config.head_dim))
    return c_q, rotate_heads(q, *rope)


def output(w: Weights, heads: torch.Tensor, rope: Angles, config: ModelConfig) -> torch.Tensor:
    """Turn the heads back, project them in groups, join: [T, H, D] -> [T, d]."""
    heads = rotate_heads(heads, rope[0], -rope[1])
    count = heads.shape[0]
    grouped = heads.view(count, config.o_groups, -1)
    weight = w["attn.wo_a"].view(config.o_groups, config.o_lora_rank, -1)
    z = torch.bmm(grouped.transpose(0, 1), weight.mT).transpose(0, 1).reshape(count, -1)
    return F.linear(z, w["attn.wo_b"])


@fused
def _route(
    scores: torch.Tensor, bias: torch.Tensor, top_k: int, routed_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = torch.sqrt(F.softplus(scores.float()))
    chosen = torch.zeros_like(s)
    biased = s.detach() + bias
    for _ in range(top_k):  # a maximum at a time fuses, a sort does not
        best = (biased - chosen * 1e9).argmax(-1, keepdim=True)
        chosen = chosen + (torch.arange(s.shape[-1], device=s.device) == best).to(s.dtype)
    weights = s * chosen
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * routed_scale
    return weights, chosen, s


@fused
def _glu(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor, limit: float) -> torch.Tensor:
    """gate, up [T, E+1, I]; weights [T, E]; the shared expert stands last, with weight one."""
    h = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    w = torch.cat((weights, torch.ones_like(weights[..., :1])), -1)
    return (h * w[..., None]).to(gate.dtype)


def experts(
    w: Weights, x: torch.Tensor, config: ModelConfig, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All experts on all tokens, weighted by the router: (y [T, d], chosen 0/1 [T, E], scores [T, E]).

    With experts this narrow three wide products beat a gather; the weights of experts not chosen are zero.
    """
    scores = F.linear(x, w["ffn.gate.weight"])
    weights, chosen, s = _route(scores, w["ffn.gate.bias"], top_k, config.routed_scaling_factor)
    parts = ("w1", "w2", "w3")
    joined = {part: torch.cat((w[f"ffn.experts.{part}"], w[f"ffn.shared_experts.{part}"][None])) for part in parts}
    count, inter, width = joined["w1"].shape
    gate, up = (F.linear(x, joined[part].view(-1, width)).unflatten(-1, (count, inter)) for part in ("w1", "w3"))
    h = _glu(gate, up, weights, config.swiglu_limit)
    return F.linear(h.flatten(-2), joined["w2"].transpose(0, 1).reshape(width, -1)), chosen, s


def hyper(w: Weights, half: str) -> Hyper:
    """Coefficients of one half."""
    return Hyper(w[f"hc_{half}_fn"], w[f"hc_{half}_base"], w[f"hc_{half}_scale"])


def sub(weights: Weights, prefix: str) -> Weights:
    """The weights below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def repeated(rope: Angles, times: int) -> Angles:
    """The same angles for each of so many sequences in a row."""
    return rope[0].repeat(times, 1), rope[1].repeat(times, 1)


def angles(frequencies: torch.Tensor, positions: torch.Tensor) -> Angles:
    """cos and sin float32 [..., rd/2]; the angle is a float32 product, as everywhere (docs/model.md)."""
    angle = (positions.float()[..., None] * frequencies).double()
    return angle.cos().float(), angle.sin().float()
