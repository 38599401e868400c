"""Makes the dataset folder: gathers, makes up, encodes, writes."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kernel_core.check import require
from orchestrator.corpus.encode import TextEncoder
from orchestrator.corpus.folder import check_new, engram_constants, write_folder
from orchestrator.corpus.gather import Gathered, Source, gather
from orchestrator.corpus.heldout import differences, heldout_texts
from orchestrator.corpus.made import chat_documents, retrieval_documents, up_to
from orchestrator.corpus.packages import PACKAGES
from orchestrator.corpus.wheels import Package
from orchestrator.model.config import ModelConfig
from orchestrator.text.files import bundled_tokenizer
from orchestrator.text.specials import SMALL_VOCABULARIES
from orchestrator.text.tokenizer import Tokenizer

CHAT_SHARE, RETRIEVAL_SHARE = 0.06, 0.04
"""Parts of all training tokens."""
HELDOUT_CHATS, HELDOUT_RETRIEVALS = 400, 40
_MADE = {
    "chat": Source("conversations", "1", "of this project; PSF-2.0 for quoted docstrings", "templates of this project"),
    "retrieval": Source(
        "retrieval", "1", "those of the other sources", "made-up values between texts of other sources"
    ),
}
Named = tuple[str, np.ndarray]


def build_dataset(
    folder: str | Path,
    config: ModelConfig,
    *,
    cache: str | Path,
    seed: int = 0,
    limit_bytes: int | None = None,
    packages: Iterable[Package] = PACKAGES,
) -> dict[str, Any]:
    """Build the dataset of a small model and write it into the new folder `folder`; returns the contents of meta.json.

    `cache` keeps downloads. With `limit_bytes` the corpus is so many bytes of the installed library and nothing is
    downloaded. Raises ValueError if the folder is not empty, no bundled tokenizer has `config.vocab_size` ids, or a
    package is not under a permissive licence; RuntimeError if one cannot be fetched. Then nothing is written.
    """
    folder, packages = Path(folder), tuple(packages)
    check_new(folder)
    require(limit_bytes is None or limit_bytes >= 10_000, "limit_bytes", limit_bytes, "None or 10000 and more")
    tokenizer = _tokenizer(config)
    engram = engram_constants(config, tokenizer)
    encoder = TextEncoder(tokenizer)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("reading", total=1 if limit_bytes is not None else len(packages) + 2)

        def reading(source: str) -> None:
            progress.update(bar, description=f"reading {source}", advance=1)

        gathered = gather(Path(cache), packages, seed=seed, limit_bytes=limit_bytes, progress=reading)
        texts = [document.text for document in gathered.documents]
        plain = list(progress.track(encoder.documents(texts), total=len(texts), description="encoding"))
        bar = progress.add_task("making conversations and retrieval documents", total=2)
        whole = sum(map(len, plain)) / (1 - CHAT_SHARE - RETRIEVAL_SHARE)
        heldout = _heldout(tokenizer, encoder, limit_bytes)
        known = {ids.tobytes() for name, ids in heldout if name.startswith("chat/")}
        made = {"chat": up_to(chat_documents(tokenizer, f"train/{seed}", known), round(whole * CHAT_SHARE))}
        progress.advance(bar)
        filler = [document.text for document in gathered.documents if document.kind == "code"]
        needles = retrieval_documents(encoder, f"train/{seed}", filler)
        made["retrieval"] = up_to(needles, round(whole * RETRIEVAL_SHARE))
        progress.advance(bar)
    meta = _meta(config, tokenizer, seed, gathered, plain, made, heldout)
    documents = [*plain, *made["chat"], *made["retrieval"]]
    order = np.random.default_rng(seed).permutation(len(documents))
    write_folder(folder, [documents[i] for i in order], [ids for _, ids in heldout], engram, meta)
    return meta


def _tokenizer(config: ModelConfig) -> Tokenizer:
    name = next((name for name, size in SMALL_VOCABULARIES.items() if size == config.vocab_size), None)
    allowed = " or ".join(str(size) for size in SMALL_VOCABULARIES.values())
    require(name is not None, "config.vocab_size", config.vocab_size, f"{allowed}, the bundled tokenizers' sizes")
    return bundled_tokenizer(str(name))


def _heldout(tokenizer: Tokenizer, encoder: TextEncoder, limit_bytes: int | None) -> list[Named]:
    """Names and ids of everything held out; in a limited corpus only the smallest texts and a few made-up ones."""
    texts, part = heldout_texts(), 1.0
    filler = [text for name, text in texts if name.startswith("python/")]
    if limit_bytes is not None:
        texts = [pair for pair in texts if len(pair[1]) <= 8000]
        part = 0.05
    named = list(zip((name for name, _ in texts), encoder.documents(text for _, text in texts), strict=True))
    chats = islice(chat_documents(tokenizer, "heldout"), round(HELDOUT_CHATS * part))
    named += [(f"chat/{number:03}", ids) for number, ids in enumerate(chats)]
    needles = islice(retrieval_documents(encoder, "heldout", filler), round(HELDOUT_RETRIEVALS * part))
    return named + [(f"retrieval/{number:03}", ids) for number, ids in enumerate(needles)]


def _meta(
    config: ModelConfig,
    tokenizer: Tokenizer,
    seed: int,
    gathered: Gathered,
    plain: Sequence[np.ndarray],
    made: dict[str, list[np.ndarray]],
    heldout: Sequence[Named],
) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for document, ids in zip(gathered.documents, plain, strict=True):
        kinds[document.kind] += len(ids)
        counts[document.source].update(documents=1, bytes=len(document.text.encode()), tokens=len(ids))
    for kind, documents in made.items():
        kinds[kind] = sum(map(len, documents))
        size = sum(_bytes(tokenizer, ids) for ids in documents)
        counts[_MADE[kind].name].update(documents=len(documents), bytes=size, tokens=kinds[kind])
    sources = [
        {**asdict(source), **{key: counts[source.name][key] for key in ("documents", "bytes", "tokens")}}
        for source in (*gathered.sources, *(_MADE[kind] for kind in made))
    ]
    texts = dict(heldout_texts())
    held = [_bytes(tokenizer, ids) for _, ids in heldout]
    return {
        "vocab_size": config.vocab_size,
        "tokenizer_sha256": hashlib.sha256(tokenizer.text.encode()).hexdigest(),
        "seed": seed,
        "train": {key: sum(source[key] for source in sources) for key in ("tokens", "bytes", "documents")},
        "heldout": {
            "tokens": sum(len(ids) for _, ids in heldout),
            "bytes": sum(held),
            "documents": len(heldout),
            "names": [name for name, _ in heldout],
        },
        "kinds": {kind: kinds[kind] for kind in ("code", "docs", "chat", "retrieval")},
        "sources": sources,
        "dropped": dict(sorted(gathered.dropped.items())),
        "notes": gathered.notes,
        "heldout_changed": differences(texts.items()),
    }


def _bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """UTF-8 bytes of the text, control tokens not counted."""
    return len(tokenizer.decode(ids.tolist()).encode())
