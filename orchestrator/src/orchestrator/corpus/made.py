"""The made-up part of the corpus, in token ids: conversations and retrieval documents."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import count

import numpy as np

from orchestrator.corpus.conversations import Encoder, make_chat
from orchestrator.corpus.encode import TextEncoder
from orchestrator.corpus.retrieval import retrieval_document
from orchestrator.text.tokenizer import Tokenizer


def chat_documents(tokenizer: Tokenizer, seed: str, taken: Collection[bytes] = ()) -> Iterator[np.ndarray]:
    """Endless different conversations, uint16 ids, none whose bytes are in `taken`."""
    encoder, known = Encoder(tokenizer), set(taken)
    for number in count():
        ids = np.array(encoder(make_chat(random.Random(f"{seed}/chat/{number}"))), dtype=np.uint16)
        if ids.tobytes() not in known:
            known.add(ids.tobytes())
            yield ids


def retrieval_documents(encoder: TextEncoder, seed: str, filler: Sequence[str]) -> Iterator[np.ndarray]:
    """Endless retrieval documents between texts of `filler`, uint16 ids."""
    texts = (retrieval_document(random.Random(f"{seed}/retrieval/{n}"), filler, encoder.count) for n in count())
    for text in texts:
        yield from encoder.documents([text])


def up_to(documents: Iterator[np.ndarray], tokens: int) -> list[np.ndarray]:
    """Documents until there are `tokens` tokens; at least one."""
    taken = [next(documents)]
    total = len(taken[0])
    while total < tokens:
        taken.append(next(documents))
        total += len(taken[-1])
    return taken
