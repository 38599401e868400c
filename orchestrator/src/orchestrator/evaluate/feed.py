"""Feeds token sequences through a model by hand, so that an evaluation decides what is computed and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.model.drafter import Drafter
from orchestrator.model.record import Recorder, StepRecorder
from orchestrator.model.taps import Taps
from orchestrator.model.transformer import Transformer

CHUNK_TOKENS = 512
_LOOK_BACK = 3


@dataclass(frozen=True)
class Bounds:
    """Where replays start and what they may write, as in `Chunk`."""

    encoder_lower: int = 0
    decoder_lower: int = 0
    global_floor: int = 0


@dataclass(frozen=True)
class Piece:
    """Positions `start` to `end` - 1 of `tokens` for request `request`; `logits` as in `Chunk`."""

    request: int
    tokens: Sequence[int]
    start: int
    end: int
    logits: str = "all"
    bounds: Bounds = Bounds()


class Feeder:
    """A cache for a few requests, each with blocks for `longest` tokens, and the calls that fill it.

    With a `drafter` the draft stages' context rows are written along.
    """

    def __init__(
        self,
        model: Transformer,
        requests: int,
        longest: int,
        *,
        quantised: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.drafter, self.requests = model, drafter, requests
        self._blocks = -(-longest // BLOCK_TOKENS)
        stages = 0 if drafter is None else len(drafter.layers)
        self.cache = CachePools(
            model.config, 1 + requests * self._blocks, 1 + requests, quantised=quantised, draft_stages=stages
        )

    def slot(self, request: int) -> int:
        return 1 + request

    def blocks(self, request: int) -> list[int]:
        first = 1 + request * self._blocks
        return list(range(first, first + self._blocks))

    def forget_windows(self, request: int) -> None:
        """What a prefix hit leaves: global rows stay, rings and tails hold nothing that may be read (NaN here)."""
        slot = self.slot(request)
        self.cache.rings[:, slot] = torch.nan if self.cache.rings.is_floating_point() else 0x7F
        for tail in self.cache.tails.values():
            tail[slot] = torch.nan

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece], recorder: Recorder | None = None) -> torch.Tensor:
        """Compute one step: logits float32 of the wanted rows, piece after piece.

        `recorder` follows the first piece.
        """
        chunks = [
            Chunk(
                tokens=list(p.tokens[p.start : p.end]),
                start=p.start,
                slot=self.slot(p.request),
                blocks=self.blocks(p.request)[: -(-p.end // BLOCK_TOKENS)],
                history=list(p.tokens[max(0, p.start - _LOOK_BACK) : p.start]),
                encoder_lower=p.bounds.encoder_lower,
                decoder_lower=p.bounds.decoder_lower,
                global_floor=p.bounds.global_floor,
                logits=p.logits,
            )
            for p in pieces
        ]
        taps = None if self.drafter is None else Taps(self.model.config)
        step_recorder = None if recorder is None else StepRecorder({0: recorder})
        batch = StepBatch.build(chunks, self.model.ratios)
        logits = self.model.forward(batch, self.cache, step_recorder, taps)
        if self.drafter is not None and taps is not None:
            self.drafter.context(taps, self.cache)
        return logits

    def run(self, piece: Piece, chunk: int = CHUNK_TOKENS, recorder: Recorder | None = None) -> torch.Tensor:
        """A long piece in steps of `chunk` tokens; with logits "last" only the final step gives any."""
        parts = []
        for start in range(piece.start, piece.end, chunk):
            end = min(start + chunk, piece.end)
            wanted = "none" if piece.logits == "last" and end < piece.end else piece.logits
            parts.append(self.step([replace(piece, start=start, end=end, logits=wanted)], recorder))
        return torch.cat(parts)
