"""The batch of a decode step, made on the device from what the device knows; nothing is read back.

The same batch as `StepBatch.build` makes on the host from tokens and drafts (a test holds the two together), but with
sizes that follow from the numbers of requests and rows alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import dspark_kernels
from orchestrator.engine.slot_table import SlotTable
from orchestrator.model.batch import Rows, StepBatch
from orchestrator.model.config import BLOCK_TOKENS


def decode_rows(
    table: SlotTable,
    schedule: dspark_kernels.Schedule,
    slots: torch.Tensor,
    lower: torch.Tensor,
    block_table: torch.Tensor,
    ratios: tuple[int, ...],
    *,
    longest: int,
    highest: int,
    apart: bool = True,
    exact: bool | None = None,
) -> StepBatch:
    """One row for every entry of `schedule`; rows that it left empty become padding requests of one token each.

    Args:
        slots: int64 [R].
        lower: int64 [R], window bound of the decoder layers.
        block_table: int32 [R, M].
        longest: rows of a request at most.
        highest: no position is above it.
        exact: make no more entries than there are completed groups and padding rows, which reads counts back; None does
            so on a CPU, whose kernels want it.
        apart: rule H11: a padding row stands at position 0 of slot 0 and sees and writes no global row.
    """
    device, count, rows = slots.device, slots.shape[0], schedule.tokens.shape[0]
    spare = rows  # requests of padding rows; those that are not needed have no row
    cu_rows, used = schedule.cu_rows, schedule.cu_rows[-1:]
    at = torch.arange(rows, device=device)
    padding = at >= used if apart else torch.zeros_like(at, dtype=torch.bool)
    positions = schedule.positions
    owner = schedule.owner.long()
    exact = _exact_on(device) if exact is None else exact
    if exact:
        spare = rows - int(used)
    if spare:
        ends = (used + torch.arange(1, spare + 1, device=device, dtype=torch.int32)).clamp_(max=rows)
        cu_rows = torch.cat([cu_rows, ends])
        owner = torch.where(padding, count + at - used, owner.clamp(min=0))

    def padded(values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        return torch.cat([values, values.new_full((spare, *values.shape[1:]), fill)]) if spare else values

    bounds = padded(lower)
    blocks = padded(block_table)
    visible = {r: ((positions + 1) // r).masked_fill(padding, 0).int() for r in ratios}
    starts = padded(table.starts.index_select(0, slots))
    decoder = Rows(cu_rows, starts, bounds, positions, visible, owner, longest, padding)
    global_slots, group_positions, group_owner = {}, {}, {}
    for ratio in ratios:
        done = positions % ratio == ratio - 1  # of padding rows those at ratio 1 only
        block = blocks[owner, positions // BLOCK_TOKENS].long()
        pool_rows = block * (BLOCK_TOKENS // ratio) + positions % BLOCK_TOKENS // ratio
        pool_rows = pool_rows.masked_fill(padding, -1)
        picked = _compacted(done, (rows + count * (ratio - 1)) // ratio, exact)
        real = picked < rows
        picked = picked.clamp(max=rows - 1)
        global_slots[ratio] = pool_rows[picked].masked_fill(~real, -1)
        group_positions[ratio] = (positions[picked] - (ratio - 1)).masked_fill(~real, 0)
        group_owner[ratio] = owner[picked].masked_fill(~real, 0)
    return StepBatch(
        chunks=[],
        tokens=schedule.tokens,
        history=padded(table.history.index_select(0, slots), -1),
        slots=padded(slots).int(),
        block_table=blocks,
        encoder=replace(decoder, lower=torch.zeros_like(bounds)),
        decoder=decoder,
        kept=None,
        highest=highest,
        global_slots=global_slots,
        group_positions=group_positions,
        group_owner=group_owner,
        is_image=None,
        logit_rows=at,
        logit_chunks=[],
    )


def _exact_on(device: torch.device) -> bool:
    return device.type == "cpu"


def _compacted(chosen: torch.Tensor, most: int, exact: bool) -> torch.Tensor:
    """Indices int64 of the true entries of `chosen` [N] in order; unless `exact` padded with N to `most`."""
    if exact:
        return chosen.nonzero().squeeze(1)
    count = chosen.shape[0]
    rank = torch.where(chosen, chosen.cumsum(0) - 1, most).clamp(max=most)
    found = torch.full((most + 1,), count, dtype=torch.int64, device=chosen.device)
    return found.scatter_(0, rank, torch.arange(count, device=chosen.device))[:most]
