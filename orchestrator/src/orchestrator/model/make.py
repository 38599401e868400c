"""A whole model folder with random weights: configuration, tokenizer and checkpoint that fit each other."""

from __future__ import annotations

from pathlib import Path

from orchestrator.model.config import ModelConfig


def make_model(config: ModelConfig, folder: str | Path, seed: int = 0) -> Path:
    """Write `config.json`, safetensors and `tokenizer.json` below `folder`; the same seed gives the same bytes.

    Engram's compressed vocabulary follows from the tokenizer, so the tokenizer is written first.
    """
    from orchestrator.model.init import init_checkpoint
    from orchestrator.text.files import write_tokenizer

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, config)
    init_checkpoint(config, folder, seed=seed)
    return folder
