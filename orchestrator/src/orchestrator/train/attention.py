"""Attention over window rows and selected compressed rows with one softmax, dense in the rows and differentiable.

Inference reads at most `index_topk` compressed rows; training computes the scores of all visible ones and masks those
that are not selected. That costs arithmetic, which a GPU has, and yields at no extra read what the indexer learns
from: the attention mass on *every* visible row. Scores are made anew in the backward pass, in slices of queries, so
that causality saves a part of the work and no score outlives its slice.

Keys are values (one latent for all heads), so a key's gradient is the sum of both roles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from orchestrator.train.fused import fused

SLICE = 512
"""Queries at a time over the compressed rows."""


def window_mask(batch: int, length: int, window: int, lower: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """bool [B, S, 2W]: which of the two blocks of keys around a query it may see.

    Queries of block i (W rows) read the keys of blocks i - 1 and i. `lower` int [B, S] is the lowest position each
    row may see (a replay starts there), None for 0.
    """
    p = torch.arange(length, device=device)
    key = (p // window - 1)[:, None] * window + torch.arange(2 * window, device=device)
    seen = ((key >= 0) & (key <= p[:, None]) & (key > p[:, None] - window))[None]
    if lower is not None:
        seen = seen & (key[None] >= lower[:, :, None])
    return seen.expand(batch, length, 2 * window).contiguous()


def _softmax(
    main: torch.Tensor | None, window: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor | None,
    seen: torch.Tensor, sink: torch.Tensor, scale: float, pw: torch.Tensor, total: torch.Tensor, mass: torch.Tensor,
    first: int, count: int,
) -> torch.Tensor | None:  # fmt: skip
    """As `rows_triton.softmax`."""
    if window.is_cuda:
        from orchestrator.train import rows_triton

        return rows_triton.softmax(main, window, visible, chosen, seen, sink, scale, pw, total, mass, first, count)
    rows = slice(first, first + count)
    infinite = float("-inf")
    w = (window[:, rows].float() * scale).masked_fill(~seen[:, rows, None], infinite)
    near = torch.logaddexp(torch.logsumexp(w, -1), sink)
    result = None
    sums = near
    if main is not None:
        groups = main.shape[-1]
        visible_rows = torch.arange(groups, device=main.device)[None, :] < visible[rows, None]
        s = (main.float() * scale).masked_fill(~visible_rows[None, :, None], infinite)
        sums = dense = torch.logaddexp(near, torch.logsumexp(s, -1))
        mass[:, rows, :groups] = torch.exp(s - dense[..., None]).sum(2).to(mass.dtype)
        if chosen is not None:
            s = s.masked_fill(~chosen[:, rows, None, :groups], infinite)
            sums = torch.logaddexp(near, torch.logsumexp(s, -1))
        result = torch.exp(s - sums[..., None]).to(main.dtype)
    total[:, rows] = sums
    pw[:, rows] = torch.exp(w - sums[..., None]).to(pw.dtype)
    return result


def _gradient(
    scores: torch.Tensor, dp: torch.Tensor, total: torch.Tensor, delta: torch.Tensor, visible: torch.Tensor | None,
    chosen: torch.Tensor | None, scale: float, first: int, count: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Probabilities and gradients of the scores of a slice, in place of `scores` and `dp` on a GPU."""
    if scores.is_cuda:
        from orchestrator.train import rows_triton

        rows_triton.gradient(scores, dp, total, delta, visible, chosen, scale, first, count)
        return scores, dp
    rows, width = slice(first, first + count), scores.shape[-1]
    allowed = torch.ones(1, 1, 1, width, dtype=torch.bool)
    if visible is not None:
        allowed = (torch.arange(width)[None, :] < visible[rows, None])[None, :, None]
    if chosen is not None:
        allowed = allowed & chosen[:, rows, None, :width]
    p = torch.exp((scores.float() * scale).masked_fill(~allowed, float("-inf")) - total[:, rows, :, None])
    return p.to(scores.dtype), (p * (dp.float() - delta[:, rows, :, None]) * scale).to(dp.dtype)


@fused
def _delta(out: torch.Tensor, grad: torch.Tensor, total: torch.Tensor, sink: torch.Tensor) -> tuple[Any, Any]:
    """Sum of out * grad a row and head, and the sink's gradient; all [T, H, ...]."""
    delta = (out.float() * grad.float()).sum(-1)
    return delta, -(torch.exp(sink - total) * delta).sum(0)


def _pairs(rows: torch.Tensor, window: int) -> torch.Tensor:
    """[B, S, D] -> [B * S/W, 2W, D]: each block of keys behind the one before it."""
    blocks = rows.unflatten(1, (-1, window))
    before = F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat([before, blocks], 2).flatten(0, 1)


class SparseAttention(torch.autograd.Function):
    """See `sparse_attention`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, rows: torch.Tensor, main: torch.Tensor | None, sink: torch.Tensor,
        seen: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor | None, window: int, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        batch, length, heads, dim = q.shape
        blocks = length // window
        near = _pairs(rows, window)
        scores = torch.bmm(q.view(batch * blocks, window * heads, dim), near.mT).view(batch, length, heads, 2 * window)
        p = torch.empty_like(scores)
        total = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        mass = q.new_zeros(batch, length, 0 if main is None else main.shape[1])
        out = None
        if main is None:
            _softmax(None, scores, visible, None, seen, sink, scale, p, total, mass, 0, length)
        else:
            ratio, out = length // main.shape[1], torch.empty_like(q)
            for a in range(0, length, SLICE):
                count = min(SLICE, length - a)
                keys = main[:, : (a + count) // ratio]
                raw = torch.bmm(q[:, a : a + count].reshape(batch, -1, dim), keys.mT).view(batch, count, heads, -1)
                far = _softmax(raw, scores, visible, chosen, seen, sink, scale, p, total, mass, a, count)
                assert far is not None
                far = torch.bmm(far.view(batch, count * heads, -1), keys)
                out[:, a : a + count] = far.view(batch, count, heads, dim)
        close = torch.bmm(p.view(batch * blocks, window * heads, 2 * window), near).view(q.shape)
        out = close if out is None else out.add_(close)
        ctx.mark_non_differentiable(mass)
        ctx.save_for_backward(q, rows, main, sink, seen, visible, chosen, out, total)
        ctx.window, ctx.scale = window, scale
        return out, mass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        q, rows, main, sink, seen, visible, chosen, out, total = ctx.saved_tensors
        window, scale = ctx.window, ctx.scale
        batch, length, heads, dim = q.shape
        blocks = length // window
        grad = grad.contiguous()
        delta, dsink = _delta(out.flatten(0, 1), grad.flatten(0, 1), total.flatten(0, 1), sink)
        delta = delta.view(total.shape)
        near = _pairs(rows, window)
        grouped, dout = (t.view(batch * blocks, window * heads, dim) for t in (q, grad))
        shape = (batch, length, heads, 2 * window)
        s, ds = torch.bmm(grouped, near.mT).view(shape), torch.bmm(dout, near.mT).view(shape)
        p, ds = _gradient(s, ds, total, delta, None, seen, scale, 0, length)
        p, ds = (t.view(batch * blocks, window * heads, 2 * window) for t in (p, ds))
        dq = torch.bmm(ds, near).view(q.shape)
        dnear = torch.baddbmm(torch.bmm(p.mT, dout), ds.mT, grouped).view(batch, blocks, 2, window, dim)
        drows = dnear[:, :, 1].clone()
        drows[:, :-1] += dnear[:, 1:, 0]
        dmain = None
        if main is not None:
            ratio = length // main.shape[1]
            dmain = torch.zeros(main.shape, dtype=torch.float32, device=main.device)
            for a in range(0, length, SLICE):
                count = min(SLICE, length - a)
                width = (a + count) // ratio
                keys = main[:, :width]
                queries, dout = (t[:, a : a + count].reshape(batch, -1, dim) for t in (q, grad))
                shape = (batch, count, heads, width)
                s, ds = torch.bmm(queries, keys.mT).view(shape), torch.bmm(dout, keys.mT).view(shape)
                p, ds = _gradient(s, ds, total, delta, visible, chosen, scale, a, count)
                p, ds = (t.view(batch, -1, width) for t in (p, ds))
                dq[:, a : a + count] += torch.bmm(ds, keys).view(batch, count, heads, dim)
                dmain[:, :width] += torch.baddbmm(torch.bmm(p.mT, dout), ds.mT, queries)
            dmain = dmain.to(main.dtype)
        return dq, drows.flatten(1, 2), dmain, dsink, None, None, None, None, None


def sparse_attention(
    q: torch.Tensor, rows: torch.Tensor, main: torch.Tensor | None, sink: torch.Tensor,
    seen: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor | None, window: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q [B, S, H, D], window rows [B, S, D], compressed rows [B, S/r, D] or None -> (out [B, S, H, D], mass).

    `seen` is `window_mask`; `visible` int32 [S] counts the compressed rows before each query (zeros without any);
    `chosen` bool [B, S, S/r] is the selection, None for all visible rows. `mass` [B, S, S/r] is the attention that the
    heads, summed, would put on each visible row if none were masked; it carries no gradient. S is a multiple of the
    window and of r.
    """
    return SparseAttention.apply(q, rows, main, sink, seen, visible, chosen, window, scale)
