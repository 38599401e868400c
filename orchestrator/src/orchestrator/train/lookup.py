"""Rows of a table, with a gradient that adds into float32 and never asks the host anything."""

from __future__ import annotations

from typing import Any

import torch


class Lookup(torch.autograd.Function):
    """See `lookup`."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return table.index_select(0, index.flatten()).view(*index.shape, table.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.rows, grad.shape[-1], dtype=torch.float32, device=grad.device)
        total.index_add_(0, index.flatten(), grad.reshape(-1, grad.shape[-1]).float())
        return total.to(grad.dtype), None


def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table [V, d], index int64 [...] -> [..., d]."""
    return Lookup.apply(table, index)
