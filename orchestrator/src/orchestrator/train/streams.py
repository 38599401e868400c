"""Hyper-connections for training: the four residual streams between half-layers (docs/model.md, Hyper-connections)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from orchestrator.train.fused import fused
from orchestrator.train.sinkhorn import sinkhorn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 in, float32 out."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@fused
def _update(x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X_j <- post_j y + sum_i comb_ij X_i. A sum over four streams, written out so that it stays element-wise."""
    n = x.shape[-2]
    mixed = sum(comb[..., i, :, None] * x[..., i, None, :] for i in range(n))
    return post[..., None] * y.float()[..., None, :] + mixed


@fused
def _mix(x: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    mixed = pre[..., 0, None] * x[..., 0, :]
    for j in range(1, x.shape[-2]):
        mixed = mixed + pre[..., j, None] * x[..., j, :]
    return rms_norm(mixed, norm, eps).to(dtype)


@fused
def _gates(
    x: torch.Tensor, m: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float, hc_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = x.shape[-2]
    m = m * torch.rsqrt(x.square().mean((-1, -2)) + eps)[..., None]
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    return pre, post, m[..., 2 * n :] * scale[2] + base[2 * n :]


@dataclass
class Hyper:
    """Coefficients of one half: fn [(2+n)n, n*d], base, scale."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


class Streams:
    """X float32 [T, n, d] with the coefficients that wait for the half-layer's output; `embedded` is [T, d]."""

    def __init__(self, embedded: torch.Tensor, n: int, eps: float, hc_eps: float, iterations: int) -> None:
        self.x = embedded.float()[..., None, :].expand(*embedded.shape[:-1], n, embedded.shape[-1]).contiguous()
        self.pre = torch.zeros(*embedded.shape[:-1], n, device=embedded.device)
        self.pre[..., 0] = 1.0
        self._post = self._comb = self.pre
        self._eps, self._hc_eps, self._iterations = eps, hc_eps, iterations

    def enter(self, hyper: Hyper, norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Input [..., d] of the next half-layer: mixed with the previous half's `pre`, then normed."""
        x, n = self.x, self.x.shape[-2]
        m = F.linear(x.flatten(-2), hyper.fn)
        pre, self._post, logits = _gates(x, m, hyper.base, hyper.scale, self._eps, self._hc_eps)
        comb = sinkhorn(logits.reshape(-1, n, n), self._iterations, self._hc_eps)
        self._comb = comb.view(*x.shape[:-2], n, n)
        mixed = _mix(x, self.pre, norm, self._eps, dtype)
        self.pre = pre
        return mixed

    def leave(self, y: torch.Tensor) -> None:
        """Add the half-layer's output [..., d]."""
        self.x = _update(self.x, y, self._post, self._comb)

    def collapse(self) -> torch.Tensor:
        """What the head reads, before its norm: float32 [..., d]."""
        return (self.pre[..., None] * self.x).sum(-2)
