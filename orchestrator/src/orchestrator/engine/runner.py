"""Carries out the scheduler's orders: moves parked state, runs the model, hands back logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol, TypeVar

import torch

from orchestrator.engine.graphs import DecodeGraphs
from orchestrator.engine.image_spans import mask, rows
from orchestrator.engine.scheduler import Step
from orchestrator.engine.sequence import Sequence
from orchestrator.engine.undo import Undo
from orchestrator.model.batch import LOOK_BACK, Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.drafter import Drafter
from orchestrator.model.record import StepRecorder
from orchestrator.model.taps import Taps
from orchestrator.model.transformer import Transformer

_T = TypeVar("_T")


class Watch(Protocol):
    """Who is told of every forward pass where it is computed, which with overlapped steps is not the host's turn."""

    def began(self, prompts: Items[bool]) -> None:
        """Before a pass: which of its requests, by the rows' `owner`, read a prompt. Those beyond the end decode."""

    def ended(self) -> None:
        """Behind a pass without an error."""


class Runner:
    """`graphs` runs the decode steps that it can; None runs every step eagerly. `drafter` gets what it needs to see.

    Attributes:
        watch: who is told of each forward pass, or None.
        undo: what takes back a step that ended in an error; None where no step can (one rank alone).
    """

    def __init__(
        self, model: Transformer, cache: CachePools, graphs: DecodeGraphs | None = None, drafter: Drafter | None = None
    ) -> None:
        self.model, self.cache, self.graphs, self.drafter = model, cache, graphs, drafter
        self.watch: Watch | None = None
        self.undo: Undo | None = None

    def forward(
        self, batch: StepBatch, recorder: StepRecorder | None = None, prompts: Items[bool] = ()
    ) -> torch.Tensor:
        """`Transformer.forward`, and the draft stages' context rows of the same tokens. `prompts` is for `watch`."""
        watch = None if self._recording else self.watch
        if watch is not None:
            watch.began(prompts)
        taps = None if self.drafter is None else Taps(self.model.config)
        logits = self.model.forward(batch, self.cache, recorder, taps)
        if self.drafter is not None and taps is not None:
            self.drafter.context(taps, self.cache)
        if watch is not None:
            watch.ended()
        return logits

    @property
    def _recording(self) -> bool:
        """Whether a CUDA graph is being recorded: nothing is computed, and whoever replays it tells `watch`."""
        return self.model.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def watched(self, replay: Callable[[], _T | None]) -> _T | None:
        """What `replay` gives; `watch` is told of a pass of decoding rows where that is not None."""
        if self.watch is not None:
            self.watch.began(())
        found = replay()
        if self.watch is not None and found is not None:
            self.watch.ended()
        return found

    @torch.inference_mode()
    def idle(self) -> None:
        """A forward pass of one padding row, for a rank without work whose peers have some.

        With experts on several ranks it is their collectives alone, with no token.
        """
        if self.model.expert_parallel:
            if self.watch is not None:
                self.watch.began(())
            self.model.join(0)
            if self.watch is not None:
                self.watch.ended()
            return
        padding = Chunk(tokens=[0], start=0, slot=0, blocks=[0], global_floor=1, logits="none")
        batch = StepBatch.build([padding], self.model.ratios)
        for seen in batch.encoder.visible.values():  # the decoder's are the same tensors
            seen.zero_()
        self.forward(batch)

    @torch.inference_mode()
    def run(self, step: Step) -> tuple[torch.Tensor, list[Sequence]]:
        """Logits float32 [R, vocab] and the sequence of each row.

        A sequence has one row when this step computed its last known token, one more for each draft behind it, and one
        a token while prompt log-probabilities are asked for.
        """
        for sequence, blocks, slot in step.park:
            sequence.parked = (self.cache.save_blocks(blocks), self.cache.save_slot(slot))
        for sequence in step.resume:
            rows, state = sequence.parked
            self.cache.load_blocks(sequence.blocks[: rows_held(rows)], rows)
            self.cache.load_slot(sequence.slot, state)
            sequence.parked = None
        if not step.work:
            return torch.empty(0, self.model.config.vocab_size, device=self.model.device), []
        if self.undo is not None:
            self.undo.keep(step.work)
        chunks = [_chunk(s, n) for s, n in step.work]
        recorders = {i: s.recorder for i, (s, _) in enumerate(step.work) if s.recorder is not None}
        if self.graphs is not None and not recorders:
            replayed = self.watched(partial(self.graphs.run, chunks))
            if replayed is not None:
                return replayed, [sequence for sequence, _ in step.work]
        batch = StepBatch.build(chunks, self.model.ratios)
        reads = [s.remaining > 1 for s, _ in step.work]
        logits = self.forward(batch, StepRecorder(recorders) if recorders else None, reads)
        if self.undo is not None:
            self.undo.forget()
        return logits, [step.work[i][0] for i in batch.logit_chunks]


def rows_held(saved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Number of blocks in what `CachePools.save_blocks` returned."""
    return next(iter(saved.values()))[0].shape[0]


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start, end = sequence.computed, sequence.computed + count
    known, images = len(sequence.tokens), sequence.images
    every_row = end > known or (sequence.params.prompt_logprobs and start < sequence.prompt_len)
    decides = end == known and sequence.leaves_at != 0  # else the decoder layers run elsewhere, or later
    return Chunk(
        tokens=sequence.tokens[start:end] + sequence.drafts[: max(0, end - known)],
        start=start,
        slot=sequence.slot,
        blocks=sequence.blocks,
        history=sequence.tokens[max(0, start - LOOK_BACK) : start],
        encoder_lower=sequence.encoder_lower,
        decoder_lower=end if sequence.leaves_at == 0 else sequence.decoder_lower,
        global_floor=sequence.global_floor,
        logits="all" if every_row else "last" if decides else "none",
        is_image=mask(images, start, end),
        history_is_image=mask(images, max(0, start - LOOK_BACK), start),
        image_rows=rows(images, start, end),
    )
