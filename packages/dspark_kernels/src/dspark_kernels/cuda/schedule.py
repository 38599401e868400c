"""The schedule of a step in one launch."""

from __future__ import annotations

import torch

from dspark_kernels.cuda import has_code
from dspark_kernels.results import MOST_DRAFTS, Schedule
from kernel_core.cuda import cuda_module, pointer, same_device, stream

MOST_REQUESTS = 1024


def fits(requests: int, drafts: int, device: torch.device) -> bool:
    """Whether the kernel holds so many requests and has code for the device."""
    return requests <= MOST_REQUESTS and drafts <= MOST_DRAFTS and has_code(device)


def schedule(
    confidence: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    limits: torch.Tensor,
    budget: int | torch.Tensor,
    capacity: int,
    slots: torch.Tensor | None,
    fixed: torch.Tensor | None,
    out: Schedule,
) -> None:
    """Writes every tensor of `out`; `out.host` lies in pinned memory, which the kernel writes to."""
    on_device, number = (budget, 0) if isinstance(budget, torch.Tensor) else (None, budget)
    same_device(confidence, tokens=tokens, starts=starts, limits=limits, budget=on_device, slots=slots, fixed=fixed)
    cuda_module("dspark_kernels").schedule(
        requests=limits.shape[0],
        drafts=confidence.shape[1],
        capacity=capacity,
        confidence=confidence.data_ptr(),
        tokens=tokens.data_ptr(),
        starts=starts.data_ptr(),
        limits=limits.data_ptr(),
        slots=pointer(slots),
        fixed=pointer(fixed),
        budget=min(number, 2**31),
        device_budget=pointer(on_device),
        lengths=out.lengths.data_ptr(),
        cu_rows=out.cu_rows.data_ptr(),
        survival=out.survival.data_ptr(),
        owner=out.owner.data_ptr(),
        place=out.place.data_ptr(),
        source=out.source.data_ptr(),
        row_of=out.row_of.data_ptr(),
        input_tokens=out.tokens.data_ptr(),
        positions=out.positions.data_ptr(),
        kv_lengths=out.kv_lengths.data_ptr(),
        host=out.host.data_ptr(),
        stream=stream(confidence.device),
    )
