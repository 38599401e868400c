"""The semantics of every op in plain PyTorch. Probabilities are float64, so that only true ties are close calls.

On any device, and without reading a value back, so that it is also what a GPU runs as long as there are no kernels.
"""

from __future__ import annotations

import torch

GREEDY_BELOW = 1e-5
DRAWS = 8  # draws at one position
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _MIX[0]
    z = (z ^ _shift(z, 27)) * _MIX[1]
    return z ^ _shift(z, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, case: int = 0) -> torch.Tensor:
    key = _mix64(seeds + _GOLDEN)
    word = _mix64(key + (positions * DRAWS + case + 1) * _GOLDEN)
    return (_shift(word, 12).double() + 0.5) * 2.0**-52


def usable(logits: torch.Tensor) -> torch.Tensor:
    """bool [T]: rows without NaN and +inf and with a finite logit."""
    return ~(logits.isnan() | (logits == torch.inf)).any(-1) & logits.isfinite().any(-1)


def distribution(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor | None
) -> torch.Tensor:
    """What `sample` draws from, float64 [T, V]: one-hot at the lowest argmax where the temperature is below 1e-5."""
    T, V = logits.shape
    greedy = temperature < GREEDY_BELOW
    scaled = logits.double() / torch.where(greedy, 1.0, temperature).double().unsqueeze(1)
    probs = scaled.softmax(-1)
    # Descending logits, the lower id first among equals
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(1, order)
    before = ranked.cumsum(-1) - ranked
    keep = (before < top_p.double().unsqueeze(1)) | (top_p.unsqueeze(1) >= 1)
    limit = torch.full((T,), V, device=logits.device) if top_k is None else torch.where(top_k > 0, top_k.long(), V)
    limit = torch.where(greedy, 1, limit)
    keep &= torch.arange(V, device=logits.device) < limit.unsqueeze(1)
    keep[:, 0].fill_(True)
    kept = torch.zeros_like(probs).scatter(1, order, ranked * keep)
    return kept / kept.sum(-1, keepdim=True)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    case: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    ok = usable(logits)
    logits = torch.where(ok.unsqueeze(1), logits, 0.0)
    probs = distribution(logits, temperature, top_p, top_k)
    reached = probs.cumsum(-1) >= uniform(seeds, positions, case).unsqueeze(1)
    tokens = torch.where(reached.any(-1), reached.int().argmax(-1), last_positive(probs))
    logprobs = logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).float()
    return torch.where(ok, tokens, -1), torch.where(ok, logprobs, torch.nan)


def last_positive(probs: torch.Tensor) -> torch.Tensor:
    """Highest id with a probability: where rounding leaves the draw beyond the sum."""
    V = probs.shape[-1]
    return V - 1 - (probs > 0).flip(-1).int().argmax(-1)


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ok = usable(logits).unsqueeze(1)
    logprobs = torch.where(ok, logits, 0.0).double().log_softmax(-1).float()
    # Sort the logits themselves: log_softmax may round two of them to one value.
    order = torch.sort(torch.where(ok, logits, 0.0), dim=-1, descending=True, stable=True).indices[:, :k]
    best = logprobs.gather(1, order)
    ids = torch.where(ok & (best > -torch.inf), order, -1)
    return ids, torch.where(ok, best, torch.nan)


def apply_token_mask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    T, V = logits.shape
    if T == 0:
        return
    token = torch.arange(V, device=logits.device)
    allowed = (bitmask[:, token // 32] >> (token % 32).to(torch.int32)) & 1
    banned = torch.where(allowed.bool(), 0.0, -torch.inf)
    index = torch.arange(T, device=logits.device) if rows is None else rows
    # Masks that are skipped go to a row behind the last; a row may have several masks.
    minus = torch.zeros(T + 1, V, device=logits.device)
    index = torch.where(index < 0, T, index).unsqueeze(1).expand_as(banned)
    minus.scatter_reduce_(0, index, banned, "amin")
    logits.masked_fill_(minus[:T] < 0, -torch.inf)
