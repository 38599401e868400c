"""From logits to tokens: masks first, then one sampling op for the whole step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

import dspark_kernels
from orchestrator.engine.sequence import Sequence

_LEAST_TOP_P = 1e-9  # keeps one token, as any smaller share would, and stays above 0 in float32
_NO_DISTRIBUTION = "the model gave no usable distribution for the next token"


class Sample(NamedTuple):
    """One row's outcome. `error` tells why there is no token."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    error: str | None


class Sampler:
    """`eos` are the model's end-of-text ids; logits come on `device`, and only tokens go to the host."""

    def __init__(self, vocab_size: int, eos: tuple[int, ...], device: torch.device | None = None) -> None:
        self.eos, self._device = eos, device or torch.device("cpu")
        self._mask_width = -(-vocab_size // 32)
        self._batch: list[Sequence] = []
        self._settings: tuple[torch.Tensor | None, ...] = ()

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sample]:
        """A token for each row, with its log-probability (after masks, before temperature).

        `logits` float32 [R, vocab], one row a sequence; it is changed in place. A row that fails says so in its
        `Sample` and leaves the others as they are.
        """
        errors = self._constrain(logits, sequences)
        self._hold_ends(logits, sequences)
        alternatives = self._alternatives(logits, sequences)
        temperature, top_p, top_k, seeds = self._settings_of(sequences)
        positions = self._there(torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int64))
        sampled = dspark_kernels.sample(logits, temperature, top_p, top_k, seeds, positions)
        tokens, logprobs = sampled if logits.is_cpu else _fetched(*sampled)
        return [
            Sample(token, logprob, alternatives.get(i, ()), errors.get(i) or (_NO_DISTRIBUTION if token < 0 else None))
            for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        ]

    def _there(self, values: torch.Tensor) -> torch.Tensor:
        """Host values on the logits' device, without waiting for it."""
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)

    def _settings_of(self, sequences: list[Sequence]) -> tuple[torch.Tensor | None, ...]:
        """Temperature, top-p, top-k (None if all are off) and seed of each row; kept while the batch stays the same."""
        if sequences != self._batch:
            params = [s.params for s in sequences]
            filters = any(p.top_k for p in params)
            self._settings = (
                self._there(torch.tensor([p.temperature for p in params], dtype=torch.float32)),
                self._there(torch.tensor([max(p.top_p, _LEAST_TOP_P) for p in params], dtype=torch.float32)),
                self._there(torch.tensor([p.top_k for p in params], dtype=torch.int32)) if filters else None,
                self._there(torch.tensor([s.seed for s in sequences], dtype=torch.int64)),
            )
            self._batch = sequences
        return self._settings

    def _constrain(self, logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, str]:
        """Mask what grammars forbid. Returns row -> error where a grammar gave up."""
        rows = [i for i, s in enumerate(sequences) if s.matcher is not None]
        errors: dict[int, str] = {}
        if rows:
            bits = np.empty((len(rows), self._mask_width), dtype=np.int32)
            for bit_row, i in zip(bits, rows, strict=True):
                try:
                    sequences[i].matcher.fill_mask(bit_row)
                except RuntimeError as error:
                    errors[i] = str(error)
                    bit_row.fill(-1)
            masks, where = torch.from_numpy(bits), torch.tensor(rows, dtype=torch.int64)
            dspark_kernels.apply_token_mask(logits, self._there(masks), self._there(where))
        return errors

    def _hold_ends(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Forbid the tokens that would end a text before its `min_tokens`."""
        for i, sequence in enumerate(sequences):
            params = sequence.params
            if sequence.output_len >= params.min_tokens:
                continue
            row = logits[i]
            ends = list(params.stop_token_ids if params.ignore_eos else self.eos + params.stop_token_ids)
            before = row[ends]
            row[ends] = -torch.inf
            if sequence.matcher is not None and row.max() == -torch.inf:
                row[ends] = before  # the grammar has come to its end and goes before `min_tokens`

    @staticmethod
    def _alternatives(logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, tuple[tuple[int, float], ...]]:
        """Row -> its most likely tokens, for the rows that want some."""
        rows = [i for i, s in enumerate(sequences) if s.params.logprobs]
        if not rows:
            return {}
        width = min(max(sequences[i].params.logprobs or 0 for i in rows), logits.shape[1])
        ids, logprobs = dspark_kernels.top_logprobs(logits[rows], width)
        found = {}
        for i, row_ids, row_logprobs in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            wanted = list(zip(row_ids, row_logprobs, strict=True))[: sequences[i].params.logprobs]
            found[i] = tuple(pair for pair in wanted if pair[0] >= 0)  # a grammar may leave fewer tokens than wanted
        return found


def _fetched(tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on the host, in one copy: the place where a step waits for the GPU."""
    both = torch.stack((tokens.double(), logprobs.double())).cpu()  # ids are exact, as they are far below 2^53
    return both[0].long(), both[1].float()
