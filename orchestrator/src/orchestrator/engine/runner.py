"""Carries out the scheduler's orders: moves parked state, runs the model, hands back logits."""

from __future__ import annotations

import torch

from orchestrator.engine.graphs import DecodeGraphs
from orchestrator.engine.scheduler import Step
from orchestrator.engine.sequence import Sequence
from orchestrator.model.batch import LOOK_BACK, Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.drafter import Drafter
from orchestrator.model.record import StepRecorder
from orchestrator.model.taps import Taps
from orchestrator.model.transformer import Transformer


class Runner:
    """`graphs` runs the decode steps that it can; None runs every step eagerly. `drafter` gets what it needs to see."""

    def __init__(
        self, model: Transformer, cache: CachePools, graphs: DecodeGraphs | None = None, drafter: Drafter | None = None
    ) -> None:
        self.model, self.cache, self.graphs, self.drafter = model, cache, graphs, drafter

    def forward(self, batch: StepBatch, recorder: StepRecorder | None = None) -> torch.Tensor:
        """`Transformer.forward`, and the draft stages' context rows of the same tokens."""
        if self.drafter is None:
            return self.model.forward(batch, self.cache, recorder)
        taps = Taps(self.model.config)
        logits = self.model.forward(batch, self.cache, recorder, taps)
        self.drafter.context(taps, self.cache)
        return logits

    @torch.inference_mode()
    def idle(self) -> None:
        """A forward pass of one padding row, for a rank without work whose peers have some.

        With experts on several ranks it is their collectives alone, with no token.
        """
        if self.model.expert_parallel:
            self.model.join(0)
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
        chunks = [_chunk(s, n) for s, n in step.work]
        recorders = {i: s.recorder for i, (s, _) in enumerate(step.work) if s.recorder is not None}
        if self.graphs is not None and not recorders:
            replayed = self.graphs.run(chunks)
            if replayed is not None:
                return replayed, [sequence for sequence, _ in step.work]
        batch = StepBatch.build(chunks, self.model.ratios)
        logits = self.forward(batch, StepRecorder(recorders) if recorders else None)
        return logits, [step.work[i][0] for i in batch.logit_chunks]


def rows_held(saved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Number of blocks in what `CachePools.save_blocks` returned."""
    return next(iter(saved.values()))[0].shape[0]


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start, end = sequence.computed, sequence.computed + count
    known = len(sequence.tokens)
    every_row = end > known or (sequence.params.prompt_logprobs and start < sequence.prompt_len)
    return Chunk(
        tokens=sequence.tokens[start:end] + sequence.drafts[: max(0, end - known)],
        start=start,
        slot=sequence.slot,
        blocks=sequence.blocks,
        history=sequence.tokens[max(0, start - LOOK_BACK) : start],
        encoder_lower=sequence.encoder_lower,
        decoder_lower=sequence.decoder_lower,
        global_floor=sequence.global_floor,
        logits="all" if every_row else "last" if end == known else "none",
    )
