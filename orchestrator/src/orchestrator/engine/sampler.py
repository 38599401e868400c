"""From logits to tokens: masks first, then one op for the whole step, with or without drafts to verify."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch

import dspark_kernels
from orchestrator.engine.masks import Masks, masks_for
from orchestrator.engine.sequence import Sequence

_LEAST_TOP_P = 1e-9  # keeps one token, as any smaller share would, and stays above 0 in float32
_NO_DISTRIBUTION = "the model gave no usable distribution for the next token"

Alternatives = tuple[tuple[int, float], ...]


class Sample(NamedTuple):
    """One token. `error` tells why there is none."""

    token: int
    logprob: float
    alternatives: Alternatives
    error: str | None


class Settings(NamedTuple):
    """Sampling parameters of a batch's requests, as `dspark_kernels.sample` takes them; `coupled` as `verify` does."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor | None
    seeds: torch.Tensor
    coupled: torch.Tensor


class Rows(NamedTuple):
    """Which rows of the logits belong to which request: what `dspark_kernels.schedule` gives under these names.

    `cu_rows` int32 [R + 1], `positions` int64 [N] of the tokens that were fed in, `row_of` int32 [R, 1 + G].
    """

    cu_rows: torch.Tensor
    positions: torch.Tensor
    row_of: torch.Tensor


class Drafted(NamedTuple):
    """Drafts as `dspark_kernels.draft_step` left them; `slots` int32 [R] is each request's row among them."""

    records: dspark_kernels.Proposals
    logits: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """What a step decided, on the device; `read` makes tokens of a copy of `tensors` on the host."""

    result: dspark_kernels.Verified
    tensors: list[torch.Tensor]  # tokens, logprobs, counts, failed, and for alternatives ids, logprobs
    errors: dict[tuple[int, int], str]
    wanted: list[tuple[int, int]]  # request row, number of alternatives

    def read(self, host: Items[torch.Tensor]) -> list[list[Sample]]:
        """Each request's tokens in order; one without a distribution ends its request's list with an error."""
        tokens, logprobs, counts, failed = (t.tolist() for t in host[:4])
        places = len(tokens[0]) if tokens else 0
        found: dict[int, list[Alternatives]] = {}
        if self.wanted:
            ids, values = host[4].tolist(), host[5].tolist()
            for n, (row, width) in enumerate(self.wanted):
                of = range(n * places, (n + 1) * places)
                pairs = ([p for p in zip(ids[i], values[i], strict=True) if p[0] >= 0] for i in of)
                found[row] = [tuple(p[:width]) for p in pairs]  # a grammar may leave fewer tokens than wanted
        nothing: list[Alternatives] = [()] * places
        samples = []
        for row, count in enumerate(counts):
            others = found.get(row, nothing)
            mine = [
                Sample(tokens[row][j], logprobs[row][j], others[j], self.errors.get((row, j))) for j in range(count)
            ]
            if failed[row]:
                mine.append(Sample(-1, float("nan"), (), self.errors.get((row, count), _NO_DISTRIBUTION)))
            samples.append(mine)
        return samples


class Sampler:
    """`eos` are the model's end-of-text ids; logits come on `device`, and only tokens go to the host."""

    def __init__(self, vocab_size: int, eos: tuple[int, ...], device: torch.device | None = None) -> None:
        self.eos, self._vocab, self._device = eos, vocab_size, device or torch.device("cpu")
        self._batch: list[Sequence] = []
        self._settings: Settings | None = None

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sample]:
        """A token for each row, with its log-probability (after masks, before temperature).

        `logits` float32 [R, vocab], one row a sequence; it is changed in place. A row that fails says so in its
        `Sample` and leaves the others as they are.
        """
        masks = masks_for(sequences, [()] * len(sequences), self.eos, self._vocab)
        if masks is not None:
            self._apply(logits, masks, self.there(torch.tensor([row for row, _ in masks.places], dtype=torch.int64)))
        wanted = _wanted(sequences)
        alternatives = {}
        if wanted:
            ids, values = self._alternatives(logits[[row for row, _ in wanted]], wanted)
            for (row, width), pair in zip(wanted, zip(ids.tolist(), values.tolist(), strict=True), strict=True):
                alternatives[row] = tuple([p for p in zip(*pair, strict=True) if p[0] >= 0][:width])
        temperature, top_p, top_k, seeds, _ = self.settings(sequences)
        positions = self.there(torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int64))
        sampled = dspark_kernels.sample(logits, temperature, top_p, top_k, seeds, positions)
        tokens, logprobs = sampled if logits.is_cpu else _fetched(*sampled)
        errors = {} if masks is None else {row: why for (row, _), why in masks.errors.items()}
        return [
            Sample(token, logprob, alternatives.get(i, ()), errors.get(i) or (_NO_DISTRIBUTION if token < 0 else None))
            for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        ]

    @torch.inference_mode()
    def verify(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        rows: Rows,
        drafted: Drafted | None,
        masks: Masks | None,
        settings: Settings | None = None,
    ) -> Verdict:
        """Accept drafts and draw what follows them; nothing waits for the device.

        `logits` float32 [N, vocab] is changed in place. `masks` are those of `masks_for` with the drafts of each
        request; `settings` those of the sequences, if they were made already.
        """
        places = rows.row_of.shape[1]
        if masks is not None and masks.places:
            at = self.there(torch.tensor([row * places + place for row, place in masks.places], dtype=torch.int64))
            self._apply(logits, masks, rows.row_of.view(-1)[at].long())
        temperature, given, top_k, seeds, coupled = settings or self.settings(sequences)
        top_p = None if _draws_from_all(sequences) else given  # known here without reading the device, faster there
        records, draft_logits, slots = (None, None, None) if drafted is None else drafted
        result = dspark_kernels.verify(
            logits, draft_logits, records, rows.cu_rows, rows.positions, temperature, top_p, top_k, seeds,
            slots=slots, coupled=coupled,
        )  # fmt: skip
        tensors, wanted = [result.tokens, result.logprobs, result.counts, result.failed], _wanted(sequences)
        if wanted:
            of = self.there(torch.tensor([row for row, _ in wanted], dtype=torch.int64))
            at = rows.row_of.index_select(0, of).view(-1).clamp(min=0).long()
            tensors += self._alternatives(logits.index_select(0, at), wanted)
        return Verdict(result, tensors, {} if masks is None else masks.errors, wanted)

    def masks(self, sequences: list[Sequence], drafts: Items[Items[int]]) -> Masks | None:
        """`masks_for` with this model's end tokens."""
        return masks_for(sequences, drafts, self.eos, self._vocab)

    def settings(self, sequences: list[Sequence]) -> Settings:
        """Parameters of each request on the device; kept while the batch stays the same."""
        if self._settings is None or sequences != self._batch:
            params = [s.params for s in sequences]
            filters = any(p.top_k for p in params)
            self._settings = Settings(
                self.there(torch.tensor([p.temperature for p in params], dtype=torch.float32)),
                self.there(torch.tensor([max(p.top_p, _LEAST_TOP_P) for p in params], dtype=torch.float32)),
                self.there(torch.tensor([p.top_k for p in params], dtype=torch.int32)) if filters else None,
                self.there(torch.tensor([s.seed for s in sequences], dtype=torch.int64)),
                self.there(torch.tensor([p.seed is not None for p in params], dtype=torch.bool)),
            )
            self._batch = list(sequences)
        return self._settings

    def there(self, values: torch.Tensor) -> torch.Tensor:
        """Host values on the logits' device, without waiting for it."""
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)

    def _apply(self, logits: torch.Tensor, masks: Masks, rows: torch.Tensor) -> None:
        if masks.places:
            dspark_kernels.apply_token_mask(logits, self.there(torch.from_numpy(masks.bits)), rows)

    def _alternatives(self, logits: torch.Tensor, wanted: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return dspark_kernels.top_logprobs(logits, min(max(width for _, width in wanted), logits.shape[1]))


def _draws_from_all(sequences: list[Sequence]) -> bool:
    """Whether nobody filters tokens, and somebody draws (greedy rows are faster in launches of their own)."""
    plain = all(s.params.top_p >= 1 and not s.params.top_k for s in sequences)
    return plain and any(s.params.temperature > 0 for s in sequences)


def _wanted(sequences: Items[Sequence]) -> list[tuple[int, int]]:
    """Rows of the requests that want alternatives, and how many."""
    return [(i, s.params.logprobs) for i, s in enumerate(sequences) if s.params.logprobs]


def _fetched(tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on the host, in one copy: the place where a step waits for the GPU."""
    both = torch.stack((tokens.double(), logprobs.double())).cpu()  # ids are exact, as they are far below 2^53
    return both[0].long(), both[1].float()
