"""Draft sampling and verification in plain PyTorch, on any device, without reading a value back."""

from __future__ import annotations

import torch

from dspark_kernels.reference import GREEDY_BELOW, distribution, last_positive, uniform, usable
from dspark_kernels.results import Proposals, Verified, new_verified

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Numbers of the draws at one position."""
_LOW32 = 0xFFFFFFFF
_SIGN64 = -(2**63)


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 [.., V] whose unsigned order is: logits ascending, equal ones by descending id."""
    bits = (logits + 0.0).view(torch.int32).long() & _LOW32
    ordered = torch.where(bits >> 31 == 1, ~bits & _LOW32, bits | 0x80000000)
    return ordered << 32 | (_LOW32 - torch.arange(logits.shape[-1], device=logits.device))


def law(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """top, factor, mass and cut (see `Proposals`), each [B], of rows that have a distribution."""
    V = logits.shape[1]
    greedy = temperature < GREEDY_BELOW
    factor = torch.where(greedy, 1.0, 1.0 / torch.where(greedy, 1.0, temperature))
    top = logits.amax(-1)
    kept = distribution(logits, temperature, top_p, top_k) > 0
    filtered = greedy | (top_p < 1)
    if top_k is not None:
        filtered = filtered | ((top_k > 0) & (top_k < V))
    weights = ((logits - top.unsqueeze(1)) * factor.unsqueeze(1)).double().exp()
    mass = torch.where(greedy, 1.0, (weights * kept).sum(-1))
    keys = order_keys(logits)
    last = torch.where(kept, keys ^ _SIGN64, 2**63 - 1).amin(-1) ^ _SIGN64
    return top, factor, mass, torch.where(filtered, last, 0)


def probabilities(
    logits: torch.Tensor, top: torch.Tensor, factor: torch.Tensor, mass: torch.Tensor, cut: torch.Tensor
) -> torch.Tensor:
    """float64 [B, V] of a record."""
    weights = ((logits - top.unsqueeze(1)) * factor.unsqueeze(1)).double().exp() / mass.unsqueeze(1)
    kept = (order_keys(logits) ^ _SIGN64) >= (cut ^ _SIGN64).unsqueeze(1)
    return torch.where(kept, weights, 0.0)


def inverse(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token where the running sum of `probs` [B, V] reaches `u` [B]."""
    reached = probs.cumsum(-1) >= u.unsqueeze(1)
    return torch.where(reached.any(-1), reached.int().argmax(-1), last_positive(probs))


def draft_step(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: Proposals,
    coupled: torch.Tensor | None,
) -> torch.Tensor:
    if bias is not None:
        logits[:, k] += bias
    ok = usable(logits[:, k])
    rows = torch.where(ok.unsqueeze(1), logits[:, k], 0.0)
    u = uniform(seeds, positions + 1 + k, DRAFT)
    if coupled is not None:
        u = torch.where(coupled, uniform(seeds, positions + 1 + k, TARGET), u)
    tokens = inverse(distribution(rows, temperature, top_p, top_k), u)
    record = law(rows, temperature, top_p, top_k)
    logprobs = probabilities(rows, *record).gather(1, tokens.unsqueeze(1)).squeeze(1).log()
    tokens = torch.where(ok, tokens, -1)
    out.tokens[:, k] = tokens
    for column, value in zip(out[1:5], (logprobs, *record[:3]), strict=True):
        column[:, k] = torch.where(ok, value.to(column.dtype), torch.nan)
    out.cut[:, k] = torch.where(ok, record[3], 0)
    return tokens


def verify(
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    proposals: Proposals | None,
    cu_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    slots: torch.Tensor | None,
    coupled: torch.Tensor | None,
) -> Verified:
    (N, V), R = logits.shape, len(cu_rows) - 1
    G = 0 if proposals is None else proposals.tokens.shape[1]
    out = new_verified(R, G, logits.device)
    out.tokens.fill_(-1)
    out.logprobs.fill_(torch.nan)
    for zero in (out.accepted, out.counts, out.failed):
        zero.zero_()
    out.last.fill_(-1)
    if N == 0:
        return out
    first = cu_rows[:-1].long()
    length = (cu_rows[1:].long() - first - 1).clamp(max=G)
    slot = torch.arange(R, device=logits.device) if slots is None else slots.long().clamp(min=0)
    matched = temperature < GREEDY_BELOW if coupled is None else coupled | (temperature < GREEDY_BELOW)
    here = length >= 0
    for j in range(G + 1):
        here = here & (j <= length)
        row = (first + j).clamp(0, N - 1)
        ok = usable(logits[row])
        rows = torch.where(ok.unsqueeze(1), logits[row], 0.0)
        p = distribution(rows, temperature, top_p, top_k)
        position = positions[row] + 1
        token = inverse(p, uniform(seeds, position, TARGET))
        accepted = torch.zeros_like(here)
        if j < G:
            assert draft_logits is not None and proposals is not None
            draft, log_q = proposals.tokens[slot, j], proposals.logprobs[slot, j].double()
            known = (draft >= 0) & (draft < V) & log_q.isfinite()
            draft = torch.where(known, draft, 0)
            q = probabilities(draft_logits[slot, j], *(column[slot, j] for column in proposals[2:]))
            chance = (p.gather(1, draft.unsqueeze(1)).squeeze(1).log() - log_q).exp()
            passed = known & (uniform(seeds, position, ACCEPT) < chance)
            rest = torch.where(known.unsqueeze(1), (p - q).clamp(min=0), p)
            total = rest.sum(-1, keepdim=True)
            redrawn = inverse(torch.where(total > 0, rest / total, p), uniform(seeds, position, RESIDUAL))
            chosen = torch.where(passed, draft, redrawn)
            end = j == length
            accepted = here & ok & ~end & torch.where(matched, known & (token == draft), passed)
            token = torch.where(end | matched, token, chosen)
        emitted = here & ok
        logprob = rows.double().log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1).float()
        out.tokens[:, j] = torch.where(emitted, token, -1)
        out.logprobs[:, j] = torch.where(emitted, logprob, torch.nan)
        out.last.copy_(torch.where(emitted, token, out.last))
        out.counts.add_(emitted)
        out.accepted.add_(accepted)
        out.failed.logical_or_(here & ~ok)
        here = accepted
    return out
