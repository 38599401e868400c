"""Tokenizer files beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.text import specials
from orchestrator.text.tokenizer import TOKENIZER_FILE, Tokenizer

_DATA = Path(__file__).parent / "data"


def bundled_tokenizer(name: str) -> Tokenizer:
    """The tokenizer made for a small model. Raises ValueError for other names."""
    if name not in specials.SMALL_VOCABULARIES:
        raise ValueError(f"name: got {name!r}, allowed is one of {', '.join(specials.SMALL_VOCABULARIES)}")
    return Tokenizer((_DATA / f"{name}.json").read_text(encoding="utf-8"))


def write_tokenizer(path: str | Path, config: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder `path`.

    `config` is the model's: its vocab_size picks the bundled vocabulary, max_position_embeddings goes into the
    file. Raises ValueError, before anything is written, if no bundled vocabulary has that size.
    """
    name = next((name for name, size in specials.SMALL_VOCABULARIES.items() if size == config.vocab_size), None)
    if name is None:
        sizes = ", ".join(str(size) for size in specials.SMALL_VOCABULARIES.values())
        raise ValueError(f"config.vocab_size: got {config.vocab_size}, a tokenizer is bundled for {sizes}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    text = bundled_tokenizer(name).text
    settings = tokenizer_config(getattr(config, "max_position_embeddings", 1048576))
    (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Contents of tokenizer_config.json, for libraries that read one. BOS is never added by itself."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": specials.BOS,
        "eos_token": specials.EOS,
        "pad_token": specials.PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
