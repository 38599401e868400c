"""`fathom add-vision`: an image encoder with random weights for a small model."""

from __future__ import annotations

from pathlib import Path

from orchestrator.commands.errors import UsageError


def add_vision(folder: Path, seed: int) -> int:
    """Write it into the model folder and say what was added; returns the exit status."""
    from orchestrator.model.checkpoint import Checkpoint, parameter_count
    from orchestrator.model.checkpoint.vision_shard import SHARD
    from orchestrator.model.checkpoint.vision_shard import add_vision as add
    from orchestrator.model.presets import v41_mini, v41_nano

    config = Checkpoint(folder).config
    if config.vision is not None:
        raise UsageError(f"{folder} has an image encoder already")
    towers = {made.vocab_size: made.vision for made in (v41_mini(vision=True), v41_nano(vision=True))}
    vision = towers.get(config.vocab_size)
    if vision is None:
        raise UsageError(f"{folder}: got a vocabulary of {config.vocab_size}, allowed is v41-mini or v41-nano")
    config = add(folder, vision, seed)
    count = parameter_count(config) - parameter_count(config, vision=False)
    size = (folder / SHARD).stat().st_size
    print(f"{folder / SHARD}: {count:,} parameters with random weights (seed {seed}), {size / 1e6:.1f} MB")
    print("Images are read from now on, and mean nothing to the model.")
    return 0
