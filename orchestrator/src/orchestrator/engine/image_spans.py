"""Images inside a prompt: what a caller gives, and what a sequence keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernel_core.check import require
from orchestrator.cache.chain import ImageRun
from orchestrator.model.config import ModelConfig
from orchestrator.model.vision.image import PreparedImage


@dataclass(frozen=True)
class PlacedImage:
    """An image whose tokens stand in a prompt from position `start` on."""

    start: int
    image: PreparedImage

    @property
    def end(self) -> int:
        return self.start + self.image.geometry.tokens


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """The embeddings of an image's tokens, bfloat16 [tokens, d] in host memory; `run` names it in cache keys."""

    run: ImageRun
    rows: torch.Tensor

    @property
    def start(self) -> int:
        return self.run.start

    @property
    def end(self) -> int:
        return self.run.start + self.run.tokens


def check_images(prompt: Sequence[int], images: Sequence[PlacedImage], config: ModelConfig) -> None:
    """Raise ValueError unless each image has its run of placeholder tokens, in order and apart from the others."""
    if not images:
        return
    require(config.vision is not None, "images", f"{len(images)} images", "none, since the model has no image encoder")
    behind = 0
    for number, placed in enumerate(images):
        name = f"images[{number}]"
        require(
            placed.start >= behind, name, f"start {placed.start}", f"{behind} or more (in order, none over another)"
        )
        require(placed.end <= len(prompt), name, f"tokens up to {placed.end}", f"the prompt's {len(prompt)}")
        others = [p for p in range(placed.start, placed.end) if prompt[p] != config.image_token_id]
        if others:
            raise ValueError(
                f"{name}: got token {prompt[others[0]]} at position {others[0]}, allowed is the image token "
                f"({config.image_token_id}) throughout its span"
            )
        behind = placed.end


def mask(images: Sequence[ImageSpan], start: int, end: int) -> list[bool] | None:
    """Which of the positions `start` to `end` (exclusive) are inside an image; None if none is."""
    if not images:
        return None
    inside = [False] * max(0, end - start)
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            inside[first - start : last - start] = [True] * (last - first)
    return inside if any(inside) else None


def rows(images: Sequence[ImageSpan], start: int, end: int) -> torch.Tensor | None:
    """Embeddings of the positions `start` to `end` (exclusive) that are inside an image; None if none is."""
    parts = [
        image.rows[max(start, image.start) - image.start : min(end, image.end) - image.start]
        for image in images
        if max(start, image.start) < min(end, image.end)
    ]
    return torch.cat(parts) if parts else None
