"""One step's work: which tokens of which requests, where their state lives, and what follows from positions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from orchestrator.model.config import BLOCK_TOKENS

LOOK_BACK = 3  # tokens before a chunk that Engram hashes with its first
NO_TOKEN = -1  # in a history: before the sequence, or inside an image


@dataclass
class Chunk:
    """One request's share of a step: consecutive tokens from `start`.

    Attributes:
        tokens: ids of the tokens to compute.
        start: position of the first of them.
        slot: the request's ring and tail slot.
        blocks: the request's block ids, first block first; they cover every position up to the last token.
        history: the up to three tokens before `start`, oldest first (Engram looks back).
        encoder_lower: no window key below this position in encoder layers (a replay starts there).
        decoder_lower: the same for decoder layers; rows before it skip the decoder (0 runs all of them).
        global_floor: global rows are written only for groups whose last token is at or after this position.
        logits: "last" for the last row's logits, "all" for every computed row, "none".
        is_image: per token, whether it belongs to an image span; None for text.
        history_is_image: the same for `history`.
        image_rows: embeddings [n, d] of the tokens inside image spans, in order; None has them take their ids' rows.
    """

    tokens: list[int]
    start: int
    slot: int
    blocks: list[int]
    history: list[int] = field(default_factory=list)
    encoder_lower: int = 0
    decoder_lower: int = 0
    global_floor: int = 0
    logits: str = "last"
    is_image: list[bool] | None = None
    history_is_image: list[bool] | None = None
    image_rows: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Rows:
    """Geometry of the rows that a half of the model computes (all rows in the encoder, kept rows in the decoder).

    `cu_seqlens` int32 [B + 1], `start_pos` int64 [B], `positions` int64 [T], `visible` ratio -> int32 [T] (number of
    compressed rows that a query may see), `lower` int64 [B] (window bound), `owner` int64 [T] (chunk of each row).
    No request has more than `longest` rows. `padding` bool [T] marks rows of no request; None where there are none.
    """

    cu_seqlens: torch.Tensor
    start_pos: torch.Tensor
    lower: torch.Tensor
    positions: torch.Tensor
    visible: dict[int, torch.Tensor]
    owner: torch.Tensor
    longest: int
    padding: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.positions.shape[0]


@dataclass
class StepBatch:
    """Everything a step needs, derived once from its chunks."""

    chunks: list[Chunk]
    tokens: torch.Tensor
    history: torch.Tensor  # int64 [B, 3], ids before each chunk, the nearest first; -1 for none, or inside an image
    slots: torch.Tensor  # int32 [B]
    block_table: torch.Tensor  # int32 [B, M]
    encoder: Rows
    decoder: Rows
    kept: torch.Tensor | None  # int64 [T'], rows of the encoder that enter the decoder; None when all do
    highest: int  # largest position of the step
    global_slots: dict[int, torch.Tensor]  # ratio -> int64 [groups], pool row of each completed group, -1 unwritten
    group_positions: dict[int, torch.Tensor]  # ratio -> int64 [groups], rotary position of each completed group
    group_owner: dict[int, torch.Tensor]  # ratio -> int64 [groups], chunk of each completed group
    is_image: torch.Tensor | None
    logit_rows: torch.Tensor  # int64, rows of the decoder whose logits are wanted
    logit_chunks: list[int]  # chunk index of each of them
    image_at: torch.Tensor | None = None  # int64 [I], rows of the encoder that have an embedding of their own
    image_rows: torch.Tensor | None = None  # [I, d], these embeddings

    @staticmethod
    def build(chunks: list[Chunk], ratios: tuple[int, ...]) -> StepBatch:
        lengths = np.array([len(c.tokens) for c in chunks], dtype=np.int64)
        starts = np.array([c.start for c in chunks], dtype=np.int64)
        encoder_lower = np.array([c.encoder_lower for c in chunks], dtype=np.int64)
        # A replay that starts behind the decoder's bound has nothing in the rings before its start.
        decoder_lower = np.array([max(c.decoder_lower, c.encoder_lower) for c in chunks], dtype=np.int64)
        ends = np.cumsum(lengths)
        request = np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(len(request)) + (starts - ends + lengths)[request]

        width = max(len(c.blocks) for c in chunks)
        table = np.array([c.blocks + [0] * (width - len(c.blocks)) for c in chunks], dtype=np.int32)

        floors = np.array([c.global_floor for c in chunks], dtype=np.int64)[request]
        global_slots, group_positions, group_owner = {}, {}, {}
        for ratio in ratios:
            done = positions % ratio == ratio - 1  # the row that completes a group
            last, owner = positions[done], request[done]
            block, offset = np.divmod(last, BLOCK_TOKENS)
            pool_rows = table[owner, block].astype(np.int64) * (BLOCK_TOKENS // ratio) + offset // ratio
            global_slots[ratio] = torch.from_numpy(np.where(last >= floors[done], pool_rows, -1))
            group_positions[ratio] = torch.from_numpy(last - (ratio - 1))
            group_owner[ratio] = torch.from_numpy(owner)

        encoder = _rows(lengths, starts, encoder_lower, positions, request, ratios)
        if (starts >= decoder_lower).all():  # as in every decode step
            kept, kept_lengths = None, lengths
            decoder = replace(encoder, lower=torch.from_numpy(decoder_lower))
        else:
            keep = positions >= decoder_lower[request]
            kept = torch.from_numpy(np.flatnonzero(keep))
            kept_lengths = np.bincount(request[keep], minlength=len(chunks))
            first = np.maximum(starts, decoder_lower)
            decoder = _rows(kept_lengths, first, decoder_lower, positions[keep], request[keep], ratios)

        logit_rows: list[int] = []
        logit_chunks: list[int] = []
        end = 0
        for i, (chunk, rows) in enumerate(zip(chunks, kept_lengths.tolist(), strict=True)):
            end += rows
            wanted = {"all": rows, "last": min(rows, 1), "none": 0}[chunk.logits]
            logit_rows.extend(range(end - wanted, end))
            logit_chunks.extend([i] * wanted)

        images = image_at = image_rows = None
        if any(c.is_image is not None for c in chunks):
            images = torch.tensor([x for c in chunks for x in (c.is_image or [False] * len(c.tokens))])
            image_at, image_rows = _image_rows(chunks, ends - lengths)
        return StepBatch(
            chunks=chunks,
            tokens=torch.tensor([t for c in chunks for t in c.tokens], dtype=torch.int64),
            history=torch.tensor([_before(c) for c in chunks], dtype=torch.int64).view(-1, LOOK_BACK),
            slots=torch.tensor([c.slot for c in chunks], dtype=torch.int32),
            block_table=torch.from_numpy(table),
            encoder=encoder,
            decoder=decoder,
            kept=kept,
            highest=int(positions.max()) if len(positions) else 0,
            global_slots=global_slots,
            group_positions=group_positions,
            group_owner=group_owner,
            is_image=images,
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
            logit_chunks=logit_chunks,
            image_at=image_at,
            image_rows=image_rows,
        )


def _rows(
    lengths: np.ndarray,
    starts: np.ndarray,
    lower: np.ndarray,
    positions: np.ndarray,
    owner: np.ndarray,
    ratios: tuple[int, ...],
) -> Rows:
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    visible = {ratio: torch.from_numpy(((positions + 1) // ratio).astype(np.int32)) for ratio in ratios}
    return Rows(
        cu_seqlens=torch.from_numpy(cu_seqlens),
        start_pos=torch.from_numpy(starts),
        lower=torch.from_numpy(lower),
        positions=torch.from_numpy(positions),
        visible=visible,
        owner=torch.from_numpy(owner),
        longest=int(lengths.max(initial=0)),
    )


def _image_rows(chunks: list[Chunk], firsts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Where the embeddings of image spans go, and they themselves. `firsts` are the chunks' first rows."""
    at, rows = [], []
    for chunk, first in zip(chunks, firsts.tolist(), strict=True):
        if chunk.image_rows is not None:
            inside = np.flatnonzero(chunk.is_image or ())
            if len(inside) != len(chunk.image_rows):
                raise ValueError(f"image_rows: got {len(chunk.image_rows)}, allowed are {len(inside)}, one a token")
            at.append(inside + first)
            rows.append(chunk.image_rows)
    return (torch.from_numpy(np.concatenate(at)), torch.cat(rows)) if at else (None, None)


def _before(chunk: Chunk) -> list[int]:
    """Ids of the tokens before a chunk, the nearest first."""
    images = chunk.history_is_image or [False] * len(chunk.history)
    ids = [NO_TOKEN if image else token for token, image in zip(chunk.history, images, strict=True)]
    return (ids[::-1] + [NO_TOKEN] * LOOK_BACK)[:LOOK_BACK]
