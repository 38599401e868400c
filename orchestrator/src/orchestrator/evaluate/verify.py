"""Which drafts stand: the rule of speculative sampling, for a batch of requests.

A draft y is kept with probability min(1, p(y) / q(y)); the first one that is not is replaced by a draw from
max(0, p - q), normalised. So the tokens that come out are distributed as the target's own, whatever q is.
"""

from __future__ import annotations

import torch

import dspark_kernels

ACCEPT_DRAW, REPLACE_DRAW = 2, 3
"""Numbers of the uniform draws at the position of a token; 0 is that of plain sampling, 1 that of drafts."""


def acceptance(log_p: torch.Tensor, log_q: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """float64 [..., δ]: chance that each draft is kept, given that those before it were.

    `log_p`, `log_q` [..., δ, V] are the distributions that target and drafter sample from, `drafts` int64 [..., δ].
    """
    chosen = drafts.unsqueeze(-1)
    gap = log_p.double().gather(-1, chosen) - log_q.double().gather(-1, chosen)
    return gap.squeeze(-1).clamp(max=0.0).exp()


def residual(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """float64 [..., V]: what is drawn from where a draft was not kept. Equal p and q leave no mass; then it is p."""
    p = log_p.double().exp()
    left = (p - log_q.double().exp()).clamp(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp(min=torch.finfo(torch.float64).tiny), p)


def verify(
    log_p: torch.Tensor, log_q: torch.Tensor, drafts: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafts of each request are kept, int64 [B], and the token that follows them, int64 [B].

    Args:
        log_p: [B, δ + 1, V], the target's distribution of each draft's place and of the one after.
        log_q: [B, δ, V], those that the drafts were drawn from.
        drafts: int64 [B, δ].
        seeds: int64 [B].
        positions: int64 [B], where the first draft stands. A draw depends on seed and position only.
    """
    batch, length = drafts.shape
    at = positions.unsqueeze(1) + torch.arange(length)
    u = dspark_kernels.uniform(seeds.repeat_interleave(length), at.reshape(-1), ACCEPT_DRAW).view(batch, length)
    kept = (u < acceptance(log_p[:, :length], log_q, drafts)).long().cumprod(1).sum(1)
    rows = torch.arange(batch)
    last = log_p[rows, kept]
    # Behind the last draft nothing was proposed: q = 0 leaves p itself.
    proposed = log_q[rows, kept.clamp(max=length - 1)].masked_fill((kept == length).unsqueeze(1), -torch.inf)
    draw = dspark_kernels.uniform(seeds, positions + kept, REPLACE_DRAW)
    return kept, _inverse(residual(last, proposed), draw)


def _inverse(probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Token int64 [B] at which the cumulative distribution float64 [B, V] reaches u."""
    reached = (probabilities.cumsum(-1) >= u.unsqueeze(1)) & (probabilities > 0)
    last = probabilities.shape[1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1)
    return torch.where(reached.any(-1), reached.int().argmax(-1), last)
