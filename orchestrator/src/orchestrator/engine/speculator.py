"""Drafts between steps: how many are verified, what became of them, and the next ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import dspark_kernels
from orchestrator.balance.cost_curve import CostCurve
from orchestrator.balance.speculation import Budget, Rest
from orchestrator.engine.readback import fetched
from orchestrator.engine.sampler import Drafted, Rows, Sample, Sampler
from orchestrator.engine.sequence import Sequence, State
from orchestrator.model.cache import CachePools
from orchestrator.model.drafter import Drafter, Proposed

_MOST_JOINED = 1 << 26  # bytes of logits


@dataclass(frozen=True)
class Batch:
    """The requests that were drafted for last, by identity: `rows` is where each one's drafts are."""

    rows: dict[Sequence, int] = field(default_factory=dict)
    proposed: Proposed | None = None


class Speculator:
    """Up to `depth` drafts a request: all of them where `fixed`, else as many as `budget` finds worth their time.

    Drafts belong to a request, not to a row: a request that skips a step, or was parked, has none until it is drafted
    for again, and verifies its own token alone.
    """

    def __init__(self, drafter: Drafter, cache: CachePools, sampler: Sampler, depth: int, *, fixed: bool) -> None:
        self.drafter, self.cache, self.sampler, self.depth, self.fixed = drafter, cache, sampler, depth, fixed
        self.budget, self.rest = Budget(), Rest()
        self.last = Batch()

    def weigh_by(self, curve: CostCurve) -> None:
        """Choose totals by what steps cost from now on."""
        self.budget = Budget(curve)

    def drafts_now(self) -> bool:
        """Whether to draft at the end of this step; to be asked once a step."""
        return self.fixed or self.rest.drafts(self.budget.pays)

    def limit(self, sequence: Sequence, ahead: int = 0) -> int:
        """Drafts that may be verified when up to `ahead` more tokens are on their way: none beyond `max_total`."""
        room = sequence.max_total - len(sequence.tokens) - ahead - 1
        return max(0, min(self.depth, room)) if drafts_for(sequence) else 0

    def plan(self, decoding: list[Sequence]) -> None:
        """Set `planned` of every decoding request."""
        limits = [min(self.limit(s), len(s.drafts)) if s in self.last.rows else 0 for s in decoding]
        lengths = limits
        if any(limits):
            total = self.total(len(decoding), [s.stale or [] for s in decoding], limits)
            if total < sum(limits):
                lengths = self._split(decoding, limits, total)
        for sequence, length in zip(decoding, lengths, strict=True):
            sequence.planned = length

    def total(self, requests: int, confidences: list[list[float]], limits: list[int]) -> int:
        """Drafts to verify in a step over all requests, by confidences two steps old; 1.0 where there are none yet."""
        if self.fixed:
            return sum(limits)
        known = [(c or [1.0] * self.depth)[:n] for c, n in zip(confidences, limits, strict=True)]
        return self.budget.total(requests, known, sum(limits))

    def _split(self, decoding: list[Sequence], limits: list[int], total: int) -> list[int]:
        width = self.depth
        confidence = [(s.confidence + [0.0] * width)[:width] for s in decoding]
        tokens = [(s.tokens[-1:] + s.drafts + [0] * width)[: 1 + width] for s in decoding]
        schedule = dspark_kernels.schedule(
            torch.tensor(confidence, dtype=torch.float32),
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor([len(s.tokens) - 1 for s in decoding], dtype=torch.int64),
            torch.tensor(limits, dtype=torch.int32),
            total,
            len(decoding) + total,
        )
        lengths: list[int] = schedule.lengths.tolist()
        return lengths

    @torch.inference_mode()
    def verify(self, logits: torch.Tensor, groups: list[tuple[Sequence, int]]) -> list[list[Sample]]:
        """Each request's new tokens. `logits` float32 [N, vocab]: of each group one row, and one for each draft."""
        sequences, there = [s for s, _ in groups], self.sampler.there
        width = 1 + (self.depth if any(rows > 1 for _, rows in groups) else 0)
        cu_rows, positions, row_of = [0], list[int](), list[list[int]]()
        for sequence, rows in groups:
            row_of.append([*range(cu_rows[-1], cu_rows[-1] + rows), *[-1] * (width - rows)])
            positions += range(len(sequence.tokens) - 1, len(sequence.tokens) - 1 + rows)
            cu_rows.append(cu_rows[-1] + rows)
        layout = Rows(
            there(torch.tensor(cu_rows, dtype=torch.int32)),
            there(torch.tensor(positions, dtype=torch.int64)),
            there(torch.tensor(row_of, dtype=torch.int32)),
        )
        masks = self.sampler.masks(sequences, [s.drafts[: rows - 1] for s, rows in groups])
        verdict = self.sampler.verify(logits, sequences, layout, self.drafted(sequences) if width > 1 else None, masks)
        return verdict.read(fetched(verdict.tensors))

    def drafted(self, sequences: list[Sequence]) -> Drafted | None:
        """The last drafts, by the rows of a batch of requests. A request without any stands at row 0, unread."""
        if self.last.proposed is None:
            return None
        rows = torch.tensor([self.last.rows.get(s, 0) for s in sequences], dtype=torch.int32)
        return Drafted(self.last.proposed.records, self.last.proposed.logits, self.sampler.there(rows))

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence]) -> bool:
        """Draft for every request that goes on decoding. Returns whether the draft stages ran."""
        going = [s for s in sequences if s.state is State.RUNNING and s.remaining == 1 and self.limit(s) > 0]
        for sequence in sequences:
            sequence.drafts = []
        self.last = Batch()
        if not going or not self.drafts_now():
            return False
        proposed = self._drafts(going)
        self.last = Batch({s: row for row, s in enumerate(going)}, proposed)
        return True

    def _drafts(self, going: list[Sequence]) -> Proposed:
        """Draft for these requests, and have them know their drafts."""
        there = self.sampler.there
        positions = [len(s.tokens) - 1 for s in going]
        block = self.drafter.block(
            there(torch.tensor([s.tokens[-1] for s in going], dtype=torch.int64)),
            there(torch.tensor(positions, dtype=torch.int64)),
            there(torch.tensor([s.slot for s in going], dtype=torch.int32)),
            self.cache,
            max(positions),
        )
        temperature, top_p, top_k, seeds, coupled = self.sampler.settings(going)
        proposed = self.drafter.propose(block, temperature, top_p, top_k, seeds, coupled=coupled, length=self.depth)
        tokens, confidence = (t.tolist() for t in fetched([proposed.records.tokens, proposed.confidence]))
        for sequence, mine, chances in zip(going, tokens, confidence, strict=True):
            take_drafts(sequence, mine, chances, self.sampler.eos)
        return proposed

    @torch.inference_mode()
    def join(self, sequence: Sequence) -> None:
        """Draft for one request that came from another engine, beside those that were drafted for last.

        A draft depends on context rows, newest token, position and seed alone: it is the one that was made there. Where
        many large logits would have to be copied for it, the request has no drafts until the next step; nor where other
        ranks, who draft within steps only, have experts of the stages.
        """
        if self.drafter.expert_parallel:
            return
        if not (sequence.state is State.RUNNING and sequence.remaining == 1 and self.limit(sequence) > 0):
            return
        known = self.last
        if known.proposed is not None and known.proposed.logits.nbytes > _MOST_JOINED:
            return
        rows = 0 if known.proposed is None else len(known.proposed.confidence)
        mine = self._drafts([sequence])
        joined = mine if known.proposed is None else _joined(known.proposed, mine)
        self.last = Batch({**known.rows, sequence: rows}, joined)


def drafts_for(sequence: Sequence) -> bool:
    """A recorded request is not drafted for: its record shows the rows of its own tokens only."""
    return sequence.recorder is None


def take_drafts(sequence: Sequence, tokens: list[int], confidence: list[float], eos: tuple[int, ...]) -> None:
    """Note a request's new drafts. Nothing behind an end token, or behind one that is none, is worth a row."""
    sequence.stale = sequence.confidence or None
    sequence.confidence = list(confidence)
    for k, token in enumerate(tokens):
        if token < 0 or (token in eos and not sequence.params.ignore_eos):
            sequence.confidence[k + 1 :] = [0.0] * (len(tokens) - k - 1)
            break
    sequence.drafts = list(tokens)


def _joined(first: Proposed, second: Proposed) -> Proposed:
    records = [torch.cat(pair) for pair in zip(first.records, second.records, strict=True)]
    logits, confidence = (torch.cat(pair) for pair in zip(first[1:], second[1:], strict=True))
    return Proposed(type(first.records)(*records), logits, confidence)
