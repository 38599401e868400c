"""Hyper-connections: n residual streams of a row."""

from __future__ import annotations

import torch

from cann_ops.reference.rows import rms_norm


def hc_coefficients(
    X: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float = 1e-20,
    hc_eps: float = 1e-6,
    iters: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cann_ops.hc_coefficients`."""
    rows, n, _ = X.shape
    flat = X.flatten(1)
    m = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    parts = zip(m.split((n, n, n * n), dim=1), scale, base.split((n, n, n * n)), strict=True)
    pre, post, comb = (part * factor + offset for part, factor, offset in parts)
    comb = comb.view(rows, n, n).softmax(-1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return pre.sigmoid() + hc_eps, 2 * post.sigmoid(), comb


def hc_mix(X: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor | None, eps: float = 1e-20) -> torch.Tensor:
    """sum over j of pre[j] X[j], normed where there is a weight."""
    return rms_norm((pre.unsqueeze(-1) * X).sum(1), norm_weight, eps)


def hc_update(X: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    """X[j] = post[j] y + sum over i of comb[i][j] X[i], in place."""
    X.copy_(post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb, X))
