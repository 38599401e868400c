"""Small speculative steps: a Markov chain as the target, another one as the drafter."""

from __future__ import annotations

from typing import NamedTuple

import torch

import dspark_kernels
from dspark_kernels import Proposals, Verified, draft_step, new_proposals


class Settings(NamedTuple):
    """Sampling parameters of R rows."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor | None
    seeds: torch.Tensor


def settings(R: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, first_seed: int = 0) -> Settings:
    return Settings(
        torch.full((R,), temperature), torch.full((R,), top_p), torch.full((R,), top_k, dtype=torch.int32),
        torch.arange(first_seed, first_seed + R),
    )  # fmt: skip


def draft(table: torch.Tensor, anchors: torch.Tensor, positions: torch.Tensor, G: int, s: Settings, **options):
    """G drafts a row of the chain `table` [n, V] (row: token before, modulo n); (draft_logits [R, G, V], Proposals)."""
    R, V = len(anchors), table.shape[1]
    logits, out, before = torch.zeros(R, G, V), new_proposals(R, G), anchors
    for k in range(G):
        bias = table[before.clamp(min=0) % len(table)].contiguous()
        before = draft_step(logits, k, bias, s.temperature, s.top_p, s.top_k, s.seeds, positions, out, **options)
    return logits, out


def target_rows(table: torch.Tensor, anchors: torch.Tensor, drafts: torch.Tensor, lengths: torch.Tensor):
    """(logits [N, V], cu_rows, place [N], owner [N]) of the chain `table` behind the anchor and `lengths` drafts."""
    counts = lengths + 1
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.arange(len(anchors)).repeat_interleave(counts)
    place = torch.arange(int(cu[-1])) - cu[owner]
    inputs = torch.cat([anchors.unsqueeze(1), drafts], 1)[owner, place]
    return table[inputs.clamp(min=0) % len(table)].contiguous(), cu.int(), place, owner


def step(
    target: torch.Tensor,
    drafter: torch.Tensor,
    anchors: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    G: int,
    s: Settings,
    coupled: torch.Tensor | None = None,
) -> Verified:
    """Draft G tokens behind each anchor and verify the first `lengths` of them."""
    logits, proposals = draft(drafter, anchors, positions, G, s, coupled=coupled)
    rows, cu, place, owner = target_rows(target, anchors, proposals.tokens, lengths)
    return dspark_kernels.verify(rows, logits, proposals, cu, positions[owner] + place, *s, coupled=coupled)


def columns(proposals: Proposals, count: int) -> Proposals:
    """The records of the first `count` drafts."""
    return Proposals(*(t[:, :count].contiguous() for t in proposals))
