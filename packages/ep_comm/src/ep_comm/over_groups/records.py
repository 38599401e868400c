"""Token records as bytes, laid out as `Record` of layout.hpp says, in PyTorch on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ep_comm.results import Dispatched
from ep_comm.rows import encode_rows
from ep_comm.shape import GROUP, Shape


class Record(NamedTuple):
    """Byte offsets; channels begin at 0."""

    scales: int
    ids: int
    weights: int
    token: int
    bytes: int


def record_of(shape: Shape) -> Record:
    ids = shape.token_bytes
    scales = ids - (4 * shape.hidden // GROUP if shape.dispatch == "fp8" else 0)
    token = ids + 8 * shape.top_k
    return Record(scales, ids, ids + 4 * shape.top_k, token, -(-(token + 4) // 16) * 16)


def write_records(shape: Shape, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """uint8 [T, record bytes] of tokens."""
    at = record_of(shape)
    values, scales = encode_rows(x, shape)
    records = torch.zeros(x.shape[0], at.bytes, dtype=torch.uint8, device=x.device)
    tokens = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)[:, None]
    parts = [(0, values), (at.scales, scales), (at.ids, ids), (at.weights, weights), (at.token, tokens)]
    for begin, part in parts:
        if part is not None and part.numel():
            rows = part.contiguous().view(torch.uint8)
            records[:, begin : begin + rows.shape[1]] = rows
    return records


def read_records(shape: Shape, rank: int, parts: list[torch.Tensor], fixed: bool, epoch: int) -> Dispatched:
    """What came to `rank`: uint8 [n, record bytes] from each source, in the sources' order."""
    at, device = record_of(shape), parts[0].device
    sizes = [part.shape[0] for part in parts]
    records = torch.cat(parts)
    counts = torch.tensor(sizes, dtype=torch.int32)

    def field(begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        return records[:, begin:end].contiguous().view(dtype)

    x = field(0, at.scales, shape.dispatch_dtype)
    scales = field(at.scales, at.ids, torch.float32) if shape.dispatch == "fp8" else None
    ids = field(at.ids, at.weights, torch.int32)
    here = (ids >= 0) & (torch.div(ids, shape.experts, rounding_mode="floor") == rank)
    local = torch.where(here, ids - rank * shape.experts, -1).to(torch.int32)
    weights = torch.where(here, field(at.weights, at.token, torch.float32), 0.0)
    sources = field(at.token, at.token + 4, torch.int32).flatten()
    if fixed:
        rows = fixed_rows(shape, sizes, device)
        total = shape.ranks * shape.max_tokens
        x = _spread(x.view(torch.uint8), rows, total, 0).view(shape.dispatch_dtype)
        scales = None if scales is None else _spread(scales, rows, total, 0)
        local, weights, sources = (
            _spread(value, rows, total, fill) for value, fill in ((local, -1), (weights, 0), (sources, -1))
        )
    return Dispatched(x, scales, local, weights, counts.to(device), sources, fixed, epoch)


def fixed_rows(shape: Shape, sizes: list[int], device: torch.device) -> torch.Tensor:
    """Where packed rows stand in the fixed form."""
    begins = [torch.arange(n) + source * shape.max_tokens for source, n in enumerate(sizes)]
    return torch.cat(begins).to(device)


def _spread(values: torch.Tensor, rows: torch.Tensor, total: int, fill: int) -> torch.Tensor:
    out = torch.full((total, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
    out[rows] = values
    return out
