"""Recorded acceptance under steps that are really run: for models whose own drafts say nothing, as random weights'.

Forward passes, verification, drafting and scheduling do all their work on the model's own numbers. Then what they
decided is replaced on the device: confidences and the number of drafts that stand are those of recorded verifications,
one after the other. Nothing of this is reachable from a product's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from orchestrator.engine.draft_graphs import DraftGraphs, Drafting
from orchestrator.engine.engine import Engine
from orchestrator.engine.masks import Masks
from orchestrator.engine.sampler import Drafted, Rows, Sampler, Settings, Verdict
from orchestrator.engine.sequence import Sequence
from orchestrator.evaluate.speculate import Trial
from orchestrator.model.drafter import Proposed


@dataclass
class Record:
    """Verifications in a ring, and where each slot stands in it.

    `confidence` float32 [M, G], `kept` int32 [M], `cursor` int64 [slots], all on the engine's device.
    """

    confidence: torch.Tensor
    kept: torch.Tensor
    cursor: torch.Tensor

    @classmethod
    def of(cls, trials: Items[Trial], depth: int, slots: int, device: torch.device, seed: int = 0) -> Record:
        """Raises ValueError without trials, or where they have fewer drafts than the engine makes."""
        if not trials:
            raise ValueError("trials: got none, allowed is at least one")
        least = min(len(t.confidence) for t in trials)
        if least < depth:
            raise ValueError(f"trials: got {least} drafts, allowed are at least {depth}, as the engine makes")
        trials = sorted(trials, key=lambda t: t.request)  # one request's after each other, as confidences have a memory
        cursor = torch.randint(len(trials), (slots,), generator=torch.Generator().manual_seed(seed))
        return cls(
            torch.tensor([t.confidence[:depth] for t in trials], dtype=torch.float32, device=device),
            torch.tensor([min(t.kept, depth) for t in trials], dtype=torch.int32, device=device),
            cursor.to(device),
        )

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """Each slot's verification, int64 [R]."""
        return self.cursor.index_select(0, slots) % len(self.kept)


class RecordedDrafting(Drafting):
    """Drafts, with the confidences of the next recorded verification of each request."""

    def __init__(self, real: Drafting, record: Record) -> None:
        super().__init__(real.drafter, real.table, real.cache, real.depth, real.eos, real.highest)
        self.record = record

    def __call__(self, slots: torch.Tensor, settings: Settings) -> Proposed:
        proposed = super().__call__(slots, settings)
        self.record.cursor[slots] = self.record.cursor.index_select(0, slots) + 1
        confidence = self.record.confidence.index_select(0, self.record.at(slots))
        self.table.confidence[slots] = confidence
        return proposed._replace(confidence=confidence)


class RecordedSampler(Sampler):
    """Verifies, then lets as many drafts stand as the recorded verification did."""

    def __init__(self, real: Sampler, vocab_size: int, tokens: torch.Tensor, record: Record) -> None:
        """`tokens` int64 [slots, 1 + G] is the slot table's."""
        super().__init__(vocab_size, real.eos, tokens.device)
        self.tokens, self.record = tokens, record

    def verify(
        self, logits: torch.Tensor, sequences: list[Sequence], rows: Rows, drafted: Drafted | None,
        masks: Masks | None, settings: Settings | None = None,
    ) -> Verdict:  # fmt: skip
        verdict = super().verify(logits, sequences, rows, drafted, masks, settings)
        slots = self.there(torch.tensor([s.slot for s in sequences], dtype=torch.int64))
        kept = torch.minimum(self.record.kept.index_select(0, self.record.at(slots)), rows.cu_rows.diff() - 1)
        width = verdict.result.tokens.shape[1]
        place = torch.arange(width, device=slots.device)
        own = verdict.result.tokens[:, :1].clamp(min=0)
        drafts = torch.cat([self.tokens.index_select(0, slots)[:, 1:width], own], dim=1)
        accepted = kept.unsqueeze(1)
        tokens = torch.where(place < accepted, drafts, torch.where(place == accepted, own, -1))
        result = verdict.result._replace(
            tokens=tokens,
            logprobs=torch.where(tokens < 0, torch.nan, 0.0).float(),
            accepted=kept,
            counts=kept + 1,
            failed=torch.zeros_like(verdict.result.failed),
            last=own[:, 0],
        )
        decided = [result.tokens, result.logprobs, result.counts, result.failed]
        return replace(verdict, result=result, tensors=decided + verdict.tensors[4:])


def impose(engine: Engine, trials: Items[Trial], seed: int = 0) -> None:
    """Have the overlapped steps of an idle engine with drafts go as recorded.

    Prompts and other steps on their own are not concerned. Raises ValueError for an engine without drafts or
    overlapped steps, or with requests.
    """
    pipeline, speculator = engine.pipeline, engine.speculator
    if pipeline is None or speculator is None or pipeline.drafting is None or engine.has_work:
        raise ValueError("engine: got one without drafts or overlapped steps, or with requests, allowed is an idle one")
    table = pipeline.table
    record = Record.of(trials, speculator.depth, table.tokens.shape[0], table.tokens.device, seed)
    pipeline.drafting = RecordedDrafting(pipeline.drafting, record)
    if pipeline.draft_graphs is not None:
        pipeline.draft_graphs = DraftGraphs(pipeline.drafting, engine.config.max_num_seqs)
    engine.sampler = RecordedSampler(engine.sampler, engine.model.config.vocab_size, table.tokens, record)
