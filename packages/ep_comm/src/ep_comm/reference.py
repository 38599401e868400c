"""What every transport computes, in plain PyTorch on the inputs of all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_comm.results import Dispatched
from ep_comm.rows import encode_rows, round_results
from ep_comm.shape import Shape


def dispatch(
    shape: Shape,
    xs: Sequence[torch.Tensor],
    ids: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    fixed: bool = False,
    epoch: int = 1,
) -> list[Dispatched]:
    """Of each rank, from what each rank passes to `Communicator.dispatch`. Unused fixed rows are zeros, weights too."""
    encoded = [encode_rows(x, shape) for x in xs]
    owners = [torch.where(i < 0, -1, torch.div(i, shape.experts, rounding_mode="floor")) for i in ids]
    return [_received(shape, rank, encoded, owners, ids, weights, fixed, epoch) for rank in range(shape.ranks)]


def combine(
    shape: Shape, ys: Sequence[torch.Tensor], dispatched: Sequence[Dispatched], ids: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Of each rank, from each rank's results; `ids` are those that were dispatched, physical experts."""
    outs = [torch.zeros(i.shape[0], shape.hidden) for i in ids]
    slots = ys[0].ndim == 3 if ys else True
    for column in range(shape.top_k if slots else shape.ranks):
        for home, out in enumerate(outs):
            for rank in range(shape.ranks):
                if not slots and rank != column:
                    continue
                rows, tokens = _rows_from(dispatched[rank], home)
                if slots:
                    here = dispatched[rank].ids[rows, column] >= 0
                    rows, tokens = rows[here], tokens[here]
                    out[tokens] += round_results(ys[rank][rows, column], shape)
                else:
                    out[tokens] += round_results(ys[rank][rows], shape)
    return outs


def _received(
    shape: Shape,
    rank: int,
    encoded: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    owners: Sequence[torch.Tensor],
    ids: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    fixed: bool,
    epoch: int,
) -> Dispatched:
    chosen = [(owner == rank).any(1).nonzero().flatten() for owner in owners]
    counts = torch.tensor([len(c) for c in chosen], dtype=torch.int32)
    rows = shape.ranks * shape.max_tokens if fixed else int(counts.sum())
    x = torch.zeros(rows, shape.hidden, dtype=torch.float32)
    groups = shape.hidden // 128 if shape.dispatch == "fp8" else 0
    scales = torch.zeros(rows, groups)
    local = torch.full((rows, shape.top_k), -1, dtype=torch.int32)
    sent_weights = torch.zeros(rows, shape.top_k)
    sources = torch.full((rows,), -1, dtype=torch.int32)
    begin = 0
    for source, tokens in enumerate(chosen):
        begin = source * shape.max_tokens if fixed else begin
        here = slice(begin, begin + len(tokens))
        values, value_scales = encoded[source]
        x[here] = values[tokens].float()
        if value_scales is not None:
            scales[here] = value_scales[tokens]
        mine = owners[source][tokens] == rank
        local[here] = torch.where(mine, ids[source][tokens] - rank * shape.experts, -1).to(torch.int32)
        sent_weights[here] = torch.where(mine, weights[source][tokens], 0.0)
        sources[here] = tokens.to(torch.int32)
        begin += len(tokens)
    return Dispatched(
        x.to(shape.dispatch_dtype), scales if groups else None, local, sent_weights, counts, sources, fixed, epoch
    )


def _rows_from(dispatched: Dispatched, home: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that came from `home`, and their tokens' numbers there."""
    counts = dispatched.counts.tolist()
    per_source = dispatched.ids.shape[0] // len(counts) if dispatched.fixed else 0
    begin = home * per_source if dispatched.fixed else sum(counts[:home])
    rows = torch.arange(begin, begin + counts[home])
    return rows, dispatched.sources[rows].long()
