"""From logits to tokens: masks first, then one sampling op for the whole step."""

from __future__ import annotations

import torch

import dspark_kernels
from orchestrator.engine.sequence import Sequence


class Sampler:
    """`eos` are the model's end-of-text ids."""

    def __init__(self, vocab_size: int, eos: tuple[int, ...]) -> None:
        self.eos = eos
        self._mask_width = -(-vocab_size // 32)

    def sample(
        self, logits: torch.Tensor, sequences: list[Sequence]
    ) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
        """Tokens, their log-probabilities (after masks, before temperature) and the alternatives asked for.

        `logits` float32 [R, vocab], one row a sequence; it is changed in place. A token of -1 marks a row without a
        usable distribution.
        """
        self._mask(logits, sequences)
        alternatives = self._alternatives(logits, sequences)
        params = [s.params for s in sequences]
        top_k = None
        if any(p.top_k for p in params):
            top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32)
        tokens, logprobs = dspark_kernels.sample(
            logits,
            torch.tensor([p.temperature for p in params], dtype=torch.float32),
            torch.tensor([p.top_p for p in params], dtype=torch.float32),
            top_k,
            torch.tensor([s.seed for s in sequences], dtype=torch.int64),
            torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int64),
        )
        return tokens.tolist(), logprobs.tolist(), alternatives

    def _mask(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        rows = [i for i, s in enumerate(sequences) if s.matcher is not None]
        if rows:
            bits = torch.empty(len(rows), self._mask_width, dtype=torch.int32)
            for bit_row, i in zip(bits, rows, strict=True):
                sequences[i].matcher.fill_mask(bit_row)
            dspark_kernels.apply_token_mask(logits, bits, torch.tensor(rows, dtype=torch.int64))
        for row, sequence in zip(logits, sequences, strict=True):
            if sequence.output_len < sequence.params.min_tokens:
                row[list(self.eos + sequence.params.stop_token_ids)] = -torch.inf

    @staticmethod
    def _alternatives(logits: torch.Tensor, sequences: list[Sequence]) -> list[list[tuple[int, float]]]:
        found: list[list[tuple[int, float]]] = [[] for _ in sequences]
        rows = [i for i, s in enumerate(sequences) if s.params.logprobs]
        if rows:
            width = max(sequences[i].params.logprobs or 0 for i in rows)
            ids, logprobs = dspark_kernels.top_logprobs(logits[rows], width)
            for k, i in enumerate(rows):
                count = sequences[i].params.logprobs or 0
                found[i] = list(zip(ids[k, :count].tolist(), logprobs[k, :count].tolist(), strict=True))
        return found
