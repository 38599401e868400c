"""`fathom init`: write a random model."""

from __future__ import annotations

from pathlib import Path

from orchestrator.commands.errors import UsageError
from orchestrator.commands.paths import SMALL_MODELS


def init(name: str, path: Path | None, seed: int, force: bool) -> int:
    """Write the model folder and say what is in it; returns the exit status."""
    if name not in SMALL_MODELS:
        extra = " (v41-flash takes 475 GiB; point --model at a checkpoint instead)" if name == "v41-flash" else ""
        raise UsageError(f"NAME: got {name!r}, allowed is {' or '.join(SMALL_MODELS)}{extra}")
    folder = path or Path("models") / name
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give another PATH")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise UsageError(f"{folder} is not empty; give another PATH, or --force to write over what is there")
    from orchestrator.model.checkpoint.specs import parameter_count
    from orchestrator.model.init import init_checkpoint
    from orchestrator.model.presets import preset
    from orchestrator.text import write_tokenizer

    config = preset(name)
    write_tokenizer(folder, config)  # first: the Engram map of the model follows from it
    config = init_checkpoint(config, folder, seed=seed, overwrite=force)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    count = parameter_count(config)
    print(f"{folder}: {name}, {count:,} parameters with random weights (seed {seed}), {size / 1e6:.1f} MB")
    print(f'Try it: fathom generate "Once upon a time" --model {folder}')
    return 0
