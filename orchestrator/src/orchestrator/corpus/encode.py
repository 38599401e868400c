"""Texts to token ids, many at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import numpy as np
import tokenizers

from orchestrator.text.tokenizer import Tokenizer

_BATCH = 2_000_000
"""Characters encoded together: enough for every core, small enough for the library's bulky results."""


class TextEncoder:
    """Plain text to ids; spellings of special tokens in it are text like any other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.text)
        self._plain = tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
        assert tokenizer.bos_id is not None
        self._bos, self._eos = tokenizer.bos_id, tokenizer.eos_ids[0]

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self._plain.encode(text, add_special_tokens=False).ids)

    def documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """uint16 ids of each text, BOS in front and EOS at the end, in order."""
        for batch in _batches(texts):
            for encoding in self._plain.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array([self._bos, *encoding.ids, self._eos], dtype=np.uint16)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
