"""Index scores, the selection made of them, and what the indexer learns from.

The selection itself has no gradient. The indexer is trained to predict where attention goes: the distribution
softmax(score) over the visible compressed rows is drawn towards the share of attention mass that each row gets,
KL(mass || softmax(score)). The mass is that of all layers which use the selection, all heads summed, over all visible
rows, selected or not, so that a row which the indexer misses today still pulls its score up. Queries, keys and head
weights get their gradient from this loss alone; the states that they are made of get none.
"""

from __future__ import annotations

from typing import Any

import torch

SLICE = 512


def _combine(raw: torch.Tensor, weights: torch.Tensor, scores: torch.Tensor, first: int) -> None:
    """As `rows_triton.combine`."""
    if raw.is_cuda:
        from orchestrator.train import rows_triton

        return rows_triton.combine(raw, weights, scores, first)
    rows, width = slice(first, first + raw.shape[1]), raw.shape[-1]
    scores[:, rows, :width] = (raw.float().relu() * weights[:, rows, :, None]).sum(2)


def _gradient(
    raw: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, dweights: torch.Tensor, first: int
) -> torch.Tensor:
    """Gradient of the raw products, in their place on a GPU; the slice's rows of `dweights` are written."""
    if raw.is_cuda:
        from orchestrator.train import rows_triton

        rows_triton.combine_gradient(raw, weights, grad, dweights, first)
        return raw
    rows = slice(first, first + raw.shape[1])
    back = grad[:, rows, None, : raw.shape[-1]]
    dweights[:, rows] = (raw.float().relu() * back).sum(-1)
    return torch.where(raw > 0, back * weights[:, rows, :, None], 0.0).to(raw.dtype)


class IndexScores(torch.autograd.Function):
    """q [B, S, H, D], keys [B, G, D], weights float32 [B, S, H] -> float32 [B, S, G]; rows that no query of a slice
    can see stay 0."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        batch, length, heads, dim = q.shape
        ratio = length // keys.shape[1]
        scores = torch.zeros(batch, length, keys.shape[1], device=q.device)
        weights = weights.contiguous()
        for a in range(0, length, SLICE):
            count = min(SLICE, length - a)
            rows = keys[:, : (a + count) // ratio]
            raw = torch.bmm(q[:, a : a + count].reshape(batch, -1, dim), rows.mT)
            _combine(raw.view(batch, count, heads, -1), weights, scores, a)
        ctx.save_for_backward(q, keys, weights)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, keys, weights = ctx.saved_tensors
        batch, length, heads, dim = q.shape
        ratio = length // keys.shape[1]
        dq, dweights = torch.empty_like(q), torch.empty_like(weights)
        dkeys = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
        grad = grad.contiguous()
        for a in range(0, length, SLICE):
            count = min(SLICE, length - a)
            width = (a + count) // ratio
            rows, queries = keys[:, :width], q[:, a : a + count].reshape(batch, -1, dim)
            raw = torch.bmm(queries, rows.mT).view(batch, count, heads, width)
            draw = _gradient(raw, weights, grad, dweights, a).view(batch, -1, width)
            dq[:, a : a + count] = torch.bmm(draw, rows).view(batch, count, heads, dim)
            dkeys[:, :width] += torch.bmm(draw.mT, queries)
        return dq, dkeys.to(keys.dtype), dweights


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """score = sum over heads of weight * relu(q . key); see docs/model.md, Index scores."""
    return IndexScores.apply(q, keys, weights)


def visible_rows(visible: torch.Tensor, groups: int) -> torch.Tensor:
    """bool [1, S, G] of `visible` int [S], the number of rows before each query."""
    return (torch.arange(groups, device=visible.device)[None, :] < visible[:, None])[None]


def select(scores: torch.Tensor, allowed: torch.Tensor, k: int) -> torch.Tensor:
    """bool [B, S, G]: the k highest allowed scores of each row (all of them where there are no more)."""
    masked = scores.masked_fill(~allowed, float("-inf"))
    if k >= masked.shape[-1]:
        return allowed.expand(masked.shape)
    if masked.is_cuda:  # ties, which are real (ReLU makes exact zeros), fall as they like
        best = masked.topk(k, -1, sorted=False).indices
    else:  # the lower row wins, as in inference
        best = masked.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = torch.zeros_like(masked, dtype=torch.bool)
    chosen.scatter_(-1, best, True)
    return chosen & allowed


def candidate_rows(scores: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """bool [B, S, G]: visible rows in the `keep` best blocks of `block` rows, the newest visible block among them."""
    batch, length, groups = scores.shape
    allowed = visible_rows(visible, groups)
    best = scores.masked_fill(~allowed, float("-inf")).unflatten(-1, (-1, block)).amax(-1)
    newest = ((visible - 1).clamp(min=0) // block)[None, :, None].expand(batch, length, 1)
    best.scatter_(-1, newest, float("inf"))
    kept = select(best, torch.ones_like(best, dtype=torch.bool), keep)
    return kept[..., None].expand(*kept.shape, block).flatten(-2) & allowed


def index_loss(scores: torch.Tensor, allowed: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Mean over rows of KL(mass || softmax(scores)), both over the allowed rows; 0 for rows with fewer than two.

    scores float32 [B, S, G], allowed bool [B or 1, S, G], mass [B, S, G], not normalised.
    """
    if scores.is_cuda:
        from orchestrator.train import rows_triton

        return rows_triton.Divergence.apply(scores, allowed, mass)
    target = mass.float().masked_fill(~allowed, 0.0)
    total = target.sum(-1, keepdim=True)
    target = target / total.clamp(min=1e-20)
    count = allowed.sum(-1, keepdim=True)
    masked = torch.where(count > 0, scores.masked_fill(~allowed, float("-inf")), 0.0)
    log_q = scores - torch.logsumexp(masked, -1, keepdim=True)
    kl = torch.where(target > 0, target * (torch.log(target.clamp(min=1e-30)) - log_q), 0.0).sum(-1)
    return torch.where((count > 1)[..., 0] & (total > 0)[..., 0], kl, 0.0).mean()
