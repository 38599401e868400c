"""Confidences, prefix selection and layout in plain PyTorch, on any device, without reading a value back."""

from __future__ import annotations

import torch

from dspark_kernels.results import Schedule

CONFIDENCE_LIMIT = 60.0


def confidence_head(
    hidden: torch.Tensor, markov: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = (torch.cat([hidden, markov], dim=2).double() @ weight.double()).float()
    scaled = logits if temperatures is None else logits / temperatures
    confidence = scaled.clamp(-CONFIDENCE_LIMIT, CONFIDENCE_LIMIT).sigmoid()
    confidence = torch.where(scaled.isnan(), 0.0, confidence)
    return logits, confidence, survival(confidence)


def survival(confidence: torch.Tensor) -> torch.Tensor:
    valid = torch.where(confidence > 0, confidence.clamp(max=1.0), 0.0)
    running = torch.ones_like(valid[:, 0])
    columns = []
    for column in valid.unbind(1):
        running = running * column
        columns.append(running)
    return torch.stack(columns, dim=1)


def needed_rows(
    limits: torch.Tensor, slots: torch.Tensor | None, fixed: torch.Tensor | None, drafts: int
) -> torch.Tensor:
    """Rows without any budgeted draft, int64 scalar."""
    present = limits >= 0 if slots is None else (limits >= 0) & (slots >= 0)
    own = 0 if fixed is None else torch.minimum(fixed, limits).clamp(0, drafts)
    return torch.where(present, 1 + own, 0).sum()


def schedule(
    confidence: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    limits: torch.Tensor,
    budget: int | torch.Tensor,
    capacity: int,
    slots: torch.Tensor | None,
    fixed: torch.Tensor | None,
) -> Schedule:
    device, (R,), G = limits.device, limits.shape, confidence.shape[1]
    needed = needed_rows(limits, slots, fixed, G)
    fits = needed <= capacity
    given = torch.arange(R, device=device) if slots is None else slots.long()
    present = (limits >= 0) & (given >= 0) & fits
    slot = torch.where(present, given, 0)
    limit = torch.where(present, limits.clamp(max=G), 0).long()
    is_fixed = torch.zeros_like(present) if fixed is None else present & (fixed >= 0)
    alive = torch.where(present.unsqueeze(1), survival(confidence)[slot], 0.0)

    # Position-major, so that a stable sort breaks ties by position and then by request
    eligible = (present & ~is_fixed).unsqueeze(1) & (torch.arange(G, device=device) < limit.unsqueeze(1))
    flat = torch.where(eligible, alive, -1.0).t().reshape(-1)
    order = torch.sort(flat, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(R * G, device=device))
    wanted = budget.reshape(()) if isinstance(budget, torch.Tensor) else torch.full((), budget, device=device)
    wanted = wanted.clamp(min=0)
    admitted = (rank < torch.minimum(wanted, capacity - needed)).view(G, R).t() & eligible
    own = torch.zeros_like(limit) if fixed is None else torch.minimum(fixed.long(), limit)
    lengths = torch.where(is_fixed, own, admitted.sum(1))

    count = torch.where(present, lengths + 1, 0)
    cu_rows = torch.cat([count.new_zeros(1), count.cumsum(0)])
    rows = torch.arange(capacity, device=device)
    used = rows < cu_rows[-1]
    owner = torch.searchsorted(cu_rows[1:].contiguous(), rows, right=True).clamp(max=R - 1)
    place = torch.where(used, rows - cu_rows[owner], 0)
    source = torch.where(used, slot[owner] * (1 + G) + place, 0)
    there = torch.arange(1 + G, device=device)
    row_of = torch.where(there < count.unsqueeze(1), cu_rows[:-1].unsqueeze(1) + there, -1)
    total = torch.where(fits, cu_rows[-1], -needed)
    return Schedule(
        lengths.int(),
        cu_rows.int(),
        alive,
        torch.where(used, owner, -1).int(),
        place.int(),
        torch.where(used, source, -1).int(),
        row_of.int(),
        torch.where(used, tokens.reshape(-1)[source], 0),
        torch.where(used, starts[slot[owner]] + place, 0),
        torch.where(present, starts[slot] + 1 + lengths, 0).int(),
        torch.cat([lengths, total.unsqueeze(0)]).int(),
    )
