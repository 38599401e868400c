"""Decode steps in a few fixed shapes, as CUDA graphs need them: sizes, padding rows, table widths; all on the host.

A padding row is a request of one token 0 at position 0 in slot 0, the slot that no request has. It sees no compressed
row and writes none; its window row and tail go to slot 0, where nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.config import BLOCK_TOKENS

_NARROWEST, _WIDER = 4, 4  # blocks of the narrowest table; how many times wider the next one is
_UNWRITTEN = 1  # a floor above position 0


class Shape(NamedTuple):
    """What a graph is made for: requests in the batch and blocks in a row of the block table."""

    size: int
    width: int


def decode_shape(chunks: Sequence[Chunk], largest: int, context: int) -> Shape | None:
    """The shape that holds a step, or None for a step that is not one text token for each of up to `largest` requests.

    Sizes are powers of two. Tables are 4, 16, 64, ... blocks wide, up to what `context` tokens need: the indexer's work
    grows with the width.
    """
    if not 0 < len(chunks) <= largest or not all(map(_decodes, chunks)):
        return None
    size = 1 << (len(chunks) - 1).bit_length()
    needed, width = max(len(c.blocks) for c in chunks), _NARROWEST
    while width < needed:
        width *= _WIDER
    return Shape(size, max(needed, min(width, -(-context // BLOCK_TOKENS))))


def _decodes(chunk: Chunk) -> bool:
    starts = chunk.start >= max(chunk.decoder_lower, chunk.encoder_lower)
    text = chunk.is_image is None and chunk.history_is_image is None
    return len(chunk.tokens) == 1 and starts and text and chunk.logits != "none"


def padded_batch(chunks: Sequence[Chunk], shape: Shape, ratios: tuple[int, ...]) -> StepBatch:
    """The step in exactly that shape; two steps of one shape have tensors of the same sizes throughout."""
    count = len(chunks)
    padding = Chunk(tokens=[0], start=0, slot=0, blocks=[0], global_floor=_UNWRITTEN)
    batch = StepBatch.build([*chunks, *[padding] * (shape.size - count)], ratios)
    for seen in batch.encoder.visible.values():  # the decoder's are the same tensors
        seen[count:] = 0
    batch.block_table = pad(batch.block_table, (0, shape.width - batch.block_table.shape[1]))
    for groups, filler in ((batch.global_slots, -1), (batch.group_positions, 0), (batch.group_owner, 0)):
        for ratio, values in groups.items():
            groups[ratio] = pad(values, (0, shape.size - values.shape[0]), value=filler)
    return batch


def empty_batch(shape: Shape, ratios: tuple[int, ...]) -> StepBatch:
    """A step of padding rows alone: what a graph is recorded with, since running it changes nothing."""
    batch = padded_batch([Chunk(tokens=[0], start=0, slot=0, blocks=[0], global_floor=_UNWRITTEN)], shape, ratios)
    for seen in batch.encoder.visible.values():
        seen.zero_()
    return batch


def same_layout(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors of two batches agree in dtype and shape, one by one."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape for a, b in zip(one, other, strict=True)
    )
