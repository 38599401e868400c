"""A step's small tensors on their way to a GPU: packed into one buffer, one copy a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from orchestrator.model.batch import Rows, StepBatch

_ALIGNMENT = 16


def to_device(batch: StepBatch, device: torch.device) -> StepBatch:
    """The batch with its tensors on `device`; itself where they are there already."""
    if batch.tokens.device == device:
        return batch
    tensors = tensors_of(batch)
    there = views_of(batch, packed(tensors, device).to(device, non_blocking=True))
    if batch.image_rows is not None:  # large, and in few steps: by itself
        there.image_rows = batch.image_rows.to(device, non_blocking=True)
    return there


def tensors_of(batch: StepBatch) -> list[torch.Tensor]:
    """Every tensor of a batch once, in a fixed order; embeddings of images are none of them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _each_once(batch, note)
    return found


def packed(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Their bytes in one host buffer uint8 [size], pinned for a GPU.

    A new buffer each time: PyTorch's allocator hands a pinned one out again only when copies from it have ended.
    """
    places, size = _places(tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = buffer.numpy()
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.numel():
            source = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
            target[place : place + source.size] = source
    return buffer


def views_of(batch: StepBatch, buffer: torch.Tensor) -> StepBatch:
    """`batch` with its tensors replaced by views into `buffer`, which holds the bytes that `packed` made of them."""
    places = iter(_places(tensors_of(batch))[0])

    def view(tensor: torch.Tensor) -> torch.Tensor:
        place = next(places)
        return buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return _each_once(batch, view)


def _places(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts, and the size of all."""
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _each_once(batch: StepBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> StepBatch:
    """The batch with `change` applied to every tensor; one that stands in several places is changed once."""
    done: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = change(tensor)
        return done[id(tensor)]

    def maybe(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else once(tensor)

    def each(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {key: once(tensor) for key, tensor in tensors.items()}

    def half(rows: Rows) -> Rows:
        return replace(
            rows,
            cu_seqlens=once(rows.cu_seqlens),
            start_pos=once(rows.start_pos),
            lower=once(rows.lower),
            positions=once(rows.positions),
            visible=each(rows.visible),
            owner=once(rows.owner),
            padding=maybe(rows.padding),
        )

    return replace(
        batch,
        tokens=once(batch.tokens),
        history=once(batch.history),
        slots=once(batch.slots),
        block_table=once(batch.block_table),
        encoder=half(batch.encoder),
        decoder=half(batch.decoder),
        kept=maybe(batch.kept),
        global_slots=each(batch.global_slots),
        group_positions=each(batch.group_positions),
        group_owner=each(batch.group_owner),
        is_image=maybe(batch.is_image),
        image_at=maybe(batch.image_at),
        logit_rows=once(batch.logit_rows),
    )
