"""Gives a checkpoint of text alone an image encoder with random weights, in a file of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kernel_core.check import require
from orchestrator.model.checkpoint.reader import INDEX, Checkpoint
from orchestrator.model.checkpoint.specs import tensor_specs
from orchestrator.model.checkpoint.writer import write_config, write_file, write_json
from orchestrator.model.config import ModelConfig, VisionConfig
from orchestrator.model.init import RandomWeights

SHARD = "vision.safetensors"


def add_vision(folder: str | Path, vision: VisionConfig, seed: int = 0) -> ModelConfig:
    """Write the tensors of `vision`, note them in the index and in config.json; returns the new configuration.

    The same seed gives the same bytes. The files that are there stay as they are, and text is computed as before.
    Raises ValueError, before anything is written, where the checkpoint has an image encoder already.
    """
    folder = Path(folder)
    checkpoint = Checkpoint(folder)
    require(checkpoint.config.vision is None, "folder", f"{folder}, which has an image encoder", "one without")
    config = replace(checkpoint.config, vision=vision)
    specs = tensor_specs(config)
    names = sorted(set(specs) - set(tensor_specs(checkpoint.config)))
    places = {name: checkpoint.file_of(name).name for name in checkpoint.entries} | dict.fromkeys(names, SHARD)

    partial = folder / f".{SHARD}.partial"
    try:
        write_file(partial, specs, names, RandomWeights(config, seed))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, folder / SHARD)
    total = sum(spec.nbytes for spec in specs.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
    write_config(folder, config)
    return config
