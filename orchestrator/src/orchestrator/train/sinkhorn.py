"""Sinkhorn normalisation of the stream mixing, with a backward pass that stores sums instead of matrices.

A division by sums can be undone: the backward pass multiplies its way back from the result, so that it needs only the
sums of each half iteration (n numbers) and not the n x n matrices.
"""

from __future__ import annotations

from typing import Any

import torch

try:  # a CPU machine has none
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """float32 [T, n, n] -> float32 [T, n, n], rows and columns summing to one (docs/model.md, Hyper-connections)."""
    if logits.is_cuda and triton is not None:
        return _Sinkhorn.apply(logits, iterations, eps)
    return _plain(logits, iterations, eps)


def _plain(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        result, sums = run_forward(logits.contiguous(), iterations, eps)
        ctx.save_for_backward(result, sums)
        ctx.iterations, ctx.eps = iterations, eps
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        result, sums = ctx.saved_tensors
        return run_backward(result, sums, grad.contiguous(), ctx.iterations, ctx.eps), None, None


def run_forward(logits: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the sums float32 [2 * iterations - 1, T, n], through the Triton kernel."""
    rows, n, _ = logits.shape
    result = torch.empty_like(logits)
    sums = torch.empty(2 * iterations - 1, rows, n, device=logits.device)
    _forward[(triton.cdiv(rows, 64),)](logits, result, sums, rows, iterations, eps, n, 64)
    return result, sums


def run_backward(
    result: torch.Tensor, sums: torch.Tensor, grad: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    """Gradient of the logits, through the Triton kernel."""
    rows, n, _ = result.shape
    out = torch.empty_like(result)
    _backward[(triton.cdiv(rows, 64),)](result, sums, grad, out, rows, iterations, eps, n, 64)
    return out


if triton is not None:

    @triton.jit
    def _forward(logits, result, sums, rows, iterations, eps, N: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        k = tl.arange(0, N)
        at = row[:, None, None] * (N * N) + k[None, :, None] * N + k[None, None, :]
        valid = (row < rows)[:, None, None]
        store = row[:, None] * N + k[None, :]
        valid2 = (row < rows)[:, None]
        x = tl.load(logits + at, mask=valid, other=0.0)
        x = tl.exp(x - tl.max(x, 2)[:, :, None])
        c = x / tl.sum(x, 2)[:, :, None] + eps
        s = tl.sum(c, 1) + eps
        tl.store(sums + store, s, mask=valid2)
        c = c / s[:, None, :]
        for it in range(1, iterations):
            s = tl.sum(c, 2) + eps
            tl.store(sums + (2 * it - 1) * rows * N + store, s, mask=valid2)
            c = c / s[:, :, None]
            s = tl.sum(c, 1) + eps
            tl.store(sums + 2 * it * rows * N + store, s, mask=valid2)
            c = c / s[:, None, :]
        tl.store(result + at, c, mask=valid)

    @triton.jit
    def _backward(result, sums, grad, out, rows, iterations, eps, N: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        k = tl.arange(0, N)
        at = row[:, None, None] * (N * N) + k[None, :, None] * N + k[None, None, :]
        valid = (row < rows)[:, None, None]
        store = row[:, None] * N + k[None, :]
        valid2 = (row < rows)[:, None]
        c = tl.load(result + at, mask=valid, other=0.0)
        g = tl.load(grad + at, mask=valid, other=0.0)
        for back in range(1, iterations):
            it = iterations - back
            s = tl.load(sums + 2 * it * rows * N + store, mask=valid2, other=1.0)
            g = (g - tl.sum(g * c, 1)[:, None, :]) / s[:, None, :]
            c = c * s[:, None, :]
            s = tl.load(sums + (2 * it - 1) * rows * N + store, mask=valid2, other=1.0)
            g = (g - tl.sum(g * c, 2)[:, :, None]) / s[:, :, None]
            c = c * s[:, :, None]
        s = tl.load(sums + store, mask=valid2, other=1.0)
        g = (g - tl.sum(g * c, 1)[:, None, :]) / s[:, None, :]
        p = c * s[:, None, :] - eps
        g = p * (g - tl.sum(g * p, 2)[:, :, None])
        tl.store(out + at, g, mask=valid)
