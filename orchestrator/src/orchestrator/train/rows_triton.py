"""GPU kernels for rows of scores: a program a row, all heads together, any number of columns.

The plain versions stand in `attention` and `indexer`. Compiled element-wise chains would need a variant for each
slice of queries; these take the sizes as arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 512


@triton.jit
def _softmax(main, window, visible, chosen, seen, sink, p, pw, total, mass, first, count, length, width, groups, scale,
             HEADS: tl.constexpr, NEAR: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Row `first + i` of each sequence. main [B, count, H, width]; the others are over the whole length."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // count * length + first + pid % count
    h, k = tl.arange(0, HEADS), tl.arange(0, NEAR)
    infinite = float("-inf")
    near_at = (row * HEADS + h)[:, None] * NEAR + k[None, :]
    w = tl.load(window + near_at).to(tl.float32) * scale
    w = tl.where(tl.load(seen + row * NEAR + k)[None, :] != 0, w, infinite)
    top = tl.maximum(tl.max(w, 1), tl.load(sink + h))
    near = tl.sum(tl.exp(w - top[:, None]), 1) + tl.exp(tl.load(sink + h) - top)
    vis = tl.load(visible + first + pid % count)
    at = (pid * HEADS + h)[:, None] * width
    dense_top, dense = top, near
    chosen_top, picked = top, near
    for g0 in range(0, vis, BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        s = tl.load(main + at + g[None, :], mask=(g < vis)[None, :], other=infinite).to(tl.float32) * scale
        new = tl.maximum(dense_top, tl.max(s, 1))
        dense = dense * tl.exp(dense_top - new) + tl.sum(tl.exp(s - new[:, None]), 1)
        dense_top = new
        if CHOSEN:
            c = tl.load(chosen + row * groups + g, mask=g < vis, other=0)
            s = tl.where(c[None, :] != 0, s, infinite)
            new = tl.maximum(chosen_top, tl.max(s, 1))
            picked = picked * tl.exp(chosen_top - new) + tl.sum(tl.exp(s - new[:, None]), 1)
            chosen_top = new
    all_rows = dense_top + tl.log(dense)
    result = all_rows
    if CHOSEN:
        result = chosen_top + tl.log(picked)
    tl.store(total + row * HEADS + h, result)
    tl.store(pw + near_at, tl.exp(w - result[:, None]).to(pw.dtype.element_ty))
    for g0 in range(0, width, BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        inside = g < width
        s = tl.load(main + at + g[None, :], mask=(g < vis)[None, :], other=infinite).to(tl.float32) * scale
        m = tl.sum(tl.exp(s - all_rows[:, None]), 0)
        tl.store(mass + row * groups + g, m.to(mass.dtype.element_ty), mask=inside)
        if CHOSEN:
            c = tl.load(chosen + row * groups + g, mask=g < vis, other=0)
            s = tl.where(c[None, :] != 0, s, infinite)
        value = tl.exp(s - result[:, None])
        tl.store(p + at + g[None, :], value.to(p.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _gradient(scores, dp, total, delta, visible, chosen, first, count, length, width, groups, scale,
              HEADS: tl.constexpr, VISIBLE: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """In place: scores become probabilities, dp the gradients of the scores."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // count * length + first + pid % count
    h = tl.arange(0, HEADS)
    t, d = tl.load(total + row * HEADS + h), tl.load(delta + row * HEADS + h)
    vis = width
    if VISIBLE:
        vis = tl.load(visible + first + pid % count).to(tl.int32)
    at = (pid * HEADS + h)[:, None] * width
    for g0 in range(0, width, BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        inside, seen = (g < width)[None, :], (g < vis)[None, :]
        s = tl.load(scores + at + g[None, :], mask=seen, other=float("-inf")).to(tl.float32) * scale
        if CHOSEN:
            c = tl.load(chosen + row * groups + g, mask=g < vis, other=0)
            s = tl.where(c[None, :] != 0, s, float("-inf"))
        value = tl.exp(s - t[:, None])
        back = tl.load(dp + at + g[None, :], mask=seen, other=0.0).to(tl.float32)
        tl.store(scores + at + g[None, :], value.to(scores.dtype.element_ty), mask=inside)
        tl.store(dp + at + g[None, :], (value * (back - d[:, None]) * scale).to(dp.dtype.element_ty), mask=inside)


@triton.jit
def _combine(raw, weights, scores, first, count, length, width, groups, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    row = pid // count * length + first + pid % count
    h = tl.arange(0, HEADS)
    w = tl.load(weights + row * HEADS + h)
    for g0 in range(0, width, BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        r = tl.load(raw + (pid * HEADS + h)[:, None] * width + g[None, :], mask=(g < width)[None, :], other=0.0)
        total = tl.sum(tl.maximum(r.to(tl.float32), 0.0) * w[:, None], 0)
        tl.store(scores + row * groups + g, total, mask=g < width)


@triton.jit
def _combine_gradient(raw, weights, grad, dweights, first, count, length, width, groups,
                      HEADS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """In place: raw products become their gradients."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // count * length + first + pid % count
    h = tl.arange(0, HEADS)
    w = tl.load(weights + row * HEADS + h)
    dw = tl.zeros((HEADS,), tl.float32)
    for g0 in range(0, width, BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        at = raw + (pid * HEADS + h)[:, None] * width + g[None, :]
        r = tl.load(at, mask=(g < width)[None, :], other=0.0).to(tl.float32)
        back = tl.load(grad + row * groups + g, mask=g < width, other=0.0)
        dw += tl.sum(tl.maximum(r, 0.0) * back[None, :], 1)
        dr = tl.where(r > 0, back[None, :] * w[:, None], 0.0)
        tl.store(at, dr.to(raw.dtype.element_ty), mask=(g < width)[None, :])
    tl.store(dweights + row * HEADS + h, dw)


@triton.jit
def _divergence(scores, allowed, mass, kl, logsum, weight, rows, groups, length, BATCHED: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    where = pid
    if not BATCHED:
        where = pid % length
    top, total, sum_m, m_log_m, m_s, count = float("-inf"), 0.0, 0.0, 0.0, 0.0, 0
    for g0 in range(0, groups, BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        ok = tl.load(allowed + where * groups + g, mask=g < groups, other=0) != 0
        s = tl.load(scores + pid * groups + g, mask=ok, other=float("-inf"))
        m = tl.load(mass + pid * groups + g, mask=ok, other=0.0).to(tl.float32)
        new = tl.maximum(top, tl.max(s, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(s - safe), 0)
        top = new
        sum_m += tl.sum(m, 0)
        m_log_m += tl.sum(tl.where(m > 0, m * tl.log(tl.maximum(m, 1e-30)), 0.0), 0)
        m_s += tl.sum(tl.where(ok, m * s, 0.0), 0)
        count += tl.sum(ok.to(tl.int32), 0)
    scale = tl.where(sum_m > 0, 1.0 / tl.maximum(sum_m, 1e-20), 0.0)
    lse = top + tl.log(total)
    value = m_log_m * scale - tl.log(tl.maximum(sum_m, 1e-20)) - m_s * scale + lse
    used = (count > 1) & (sum_m > 0)
    tl.store(kl + pid, tl.where(used, value, 0.0))
    tl.store(logsum + pid, lse)
    tl.store(weight + pid, tl.where(used, scale, 0.0))


@triton.jit
def _divergence_gradient(scores, allowed, mass, logsum, weight, grad, out, groups, length, share,
                         BATCHED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    where = pid
    if not BATCHED:
        where = pid % length
    lse, scale = tl.load(logsum + pid), tl.load(weight + pid)
    back = tl.load(grad) * share
    back = tl.where(scale > 0, back, 0.0)
    for g0 in range(0, groups, BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        ok = tl.load(allowed + where * groups + g, mask=g < groups, other=0) != 0
        s = tl.load(scores + pid * groups + g, mask=ok, other=float("-inf"))
        m = tl.load(mass + pid * groups + g, mask=ok, other=0.0).to(tl.float32)
        value = tl.where(ok, (tl.exp(s - lse) - m * scale) * back, 0.0)
        tl.store(out + pid * groups + g, value, mask=g < groups)


def softmax(
    main: torch.Tensor | None, window: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor | None,
    seen: torch.Tensor, sink: torch.Tensor, scale: float, pw: torch.Tensor, total: torch.Tensor, mass: torch.Tensor,
    first: int, count: int,
) -> torch.Tensor | None:  # fmt: skip
    """Probabilities of a slice of rows, into `main` itself; window probabilities, log-sums and mass into the others.

    main [B, count, H, width] or None; window, pw [B, S, H, 2W]; total float32 [B, S, H]; mass [B, S, G]; visible
    int32 [S]; chosen uint8 or bool [B, S, G] or None; seen bool [B, S, 2W].
    """
    batch, length, heads, near = window.shape
    width = 0 if main is None else main.shape[-1]
    place = window if main is None else main
    _softmax[(batch * count,)](
        place, window, visible, chosen if chosen is not None else seen, seen, sink, place, pw, total, mass,
        first, count, length, width, mass.shape[-1], scale, heads, near, chosen is not None, _BLOCK,
    )  # fmt: skip
    return main


def gradient(
    scores: torch.Tensor, dp: torch.Tensor, total: torch.Tensor, delta: torch.Tensor, visible: torch.Tensor | None,
    chosen: torch.Tensor | None, scale: float, first: int, count: int,
) -> None:  # fmt: skip
    """In place: scores [B, count, H, width] become probabilities, dp (gradients of those) gradients of the scores."""
    batch, _, heads, width = scores.shape
    length = total.shape[1]
    groups = width if chosen is None else chosen.shape[-1]
    _gradient[(batch * count,)](
        scores, dp, total, delta, total if visible is None else visible, total if chosen is None else chosen,
        first, count, length, width, groups, scale, heads, visible is not None, chosen is not None, _BLOCK,
    )  # fmt: skip


def combine(raw: torch.Tensor, weights: torch.Tensor, scores: torch.Tensor, first: int) -> None:
    """scores[:, first : first + count, :width] = sum over heads of weights * relu(raw [B, count, H, width])."""
    batch, count, heads, width = raw.shape
    _combine[(batch * count,)](
        raw, weights, scores, first, count, scores.shape[1], width, scores.shape[2], heads, _BLOCK
    )


def combine_gradient(
    raw: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, dweights: torch.Tensor, first: int
) -> None:
    """In place: raw becomes its gradient; the slice's rows of dweights are written."""
    batch, count, heads, width = raw.shape
    _combine_gradient[(batch * count,)](
        raw, weights, grad, dweights, first, count, grad.shape[1], width, grad.shape[2], heads, _BLOCK
    )


class Divergence(torch.autograd.Function):
    """Mean over rows of KL(mass || softmax(scores)) over the allowed rows; see `indexer.index_loss`."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, allowed: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        batch, length, groups = scores.shape
        kl, logsum, weight = (torch.empty(batch * length, device=scores.device) for _ in range(3))
        allowed = allowed.contiguous()
        _divergence[(batch * length,)](
            scores, allowed, mass, kl, logsum, weight, batch * length, groups, length, allowed.shape[0] > 1, _BLOCK
        )
        ctx.save_for_backward(scores, allowed, mass, logsum, weight)
        return kl.mean()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        scores, allowed, mass, logsum, weight = ctx.saved_tensors
        batch, length, groups = scores.shape
        out = torch.empty_like(scores)
        _divergence_gradient[(batch * length,)](
            scores, allowed, mass, logsum, weight, grad.contiguous(), out, groups, length, 1 / (batch * length),
            allowed.shape[0] > 1, _BLOCK,
        )  # fmt: skip
        return out, None, None
