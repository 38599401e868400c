"""The image encoder of a checkpoint, without the language model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.model.checkpoint.checks import check_tensors
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.config import ModelConfig

VISION_NAMES = ("vision.", "aligner.")


@dataclass
class VisionWeights:
    """What `VisionEncoder` takes of `ModelWeights`; the same tensors."""

    config: ModelConfig
    vision: dict[str, torch.Tensor]
    image_start: torch.Tensor
    image_newline: torch.Tensor
    image_end: torch.Tensor
    bytes_read: int


def load_vision(path: str | Path) -> VisionWeights:
    """Read the encoder's tensors alone; of all others the headers are checked. Raises CheckpointError."""
    checkpoint = Checkpoint(path)
    config = checkpoint.config
    if config.vision is None:
        raise CheckpointError(f"{checkpoint.folder}/config.json: has no vision_config; give a model that reads images")
    check_tensors(config, checkpoint.entries, checkpoint.folder)
    names = [name for name in checkpoint.entries if name.startswith(VISION_NAMES)]
    tensors = {name: checkpoint.read(name) for name in names}
    start, newline, end = (checkpoint.read(f"image_{n}").to(torch.float32) for n in ("start", "newline", "end"))
    return VisionWeights(config, tensors, start, newline, end, checkpoint.bytes_read)
