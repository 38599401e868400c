"""The dataset folder: token ids, where documents start, Engram constants, an account of it all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers

from kernel_core.check import require
from orchestrator.model.config import ModelConfig
from orchestrator.model.engram_tables import EngramTables, compressed_vocab_size
from orchestrator.text.tokenizer import Tokenizer


def check_new(folder: Path) -> None:
    """Raise ValueError if something is in the folder already."""
    fine = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(fine, "folder", f"{folder}, which is not empty", "a new or empty folder")


def write_folder(
    folder: Path, train: Sequence[np.ndarray], heldout: Sequence[np.ndarray], engram: dict[str, np.ndarray], meta: dict
) -> None:
    """Write all files beside `folder` first, then rename: the folder is whole or not there."""
    check_new(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, documents in (("train", train), ("heldout", heldout)):
        tokens, starts = joined(documents)
        np.save(partial / f"{name}.npy", tokens)
        np.save(partial / f"{name}_starts.npy", starts)
    np.savez(partial / "engram.npz", **engram)  # type: ignore[arg-type]
    (partial / "meta.json").write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def joined(documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens uint16 [N] of all documents in a row, and int64 [documents], where each starts."""
    sizes = np.array([len(document) for document in documents], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if len(sizes) else np.zeros(0, np.int64)
    tokens = np.concatenate(documents) if len(sizes) else np.zeros(0, np.uint16)
    return tokens.astype(np.uint16, copy=False), starts


def engram_constants(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Token map int64 [vocab], mapped padding id, and int64 multipliers, primes and offsets of each Engram layer."""
    library = tokenizers.Tokenizer.from_str(tokenizer.text)
    if config.engram_layer_ids:
        size = compressed_vocab_size(library, config.vocab_size)
        config = replace(config, engram_compressed_vocab_size=size)
    return EngramTables.build(config, library).arrays()
