"""Prompts of text and images, for offline use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from kernel_core.check import require
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.model.config import ModelConfig
from orchestrator.model.vision.image import prepare
from orchestrator.vision.decode import decode_image
from orchestrator.vision.limits import ImageLimits
from orchestrator.vision.place import place


@dataclass(frozen=True)
class ImagePrompt:
    """Text, tokens and images in order. An image is a file, its encoded bytes, or an opened `PIL.Image.Image`.

    Example:
        >>> ImagePrompt(["What is in ", Path("photo.jpg"), "?"])
    """

    parts: Sequence[str | list[int] | Path | bytes | Image.Image]

    def place(
        self, encode: Callable[[str], list[int]], config: ModelConfig, limits: ImageLimits | None = None
    ) -> tuple[list[int], list[PlacedImage]]:
        """Token ids and the images among them; `encode` makes ids of text.

        Raises ValueError for a model without image encoder and for what is no image, OSError for a file that cannot be
        read.
        """
        vision = config.vision
        if vision is None:
            raise ValueError("prompt: got images, allowed is text, since the model has no image encoder")
        tokens: list[int] = []
        images: list[PlacedImage] = []
        for number, part in enumerate(self.parts):
            if isinstance(part, str | list):
                tokens += encode(part) if isinstance(part, str) else part
                continue
            known = isinstance(part, Path | bytes | Image.Image)
            require(known, f"parts[{number}]", type(part).__name__, "text, token ids, a Path, bytes or a PIL image")
            image = _opened(part, f"parts[{number}]", limits or ImageLimits())
            span, placed = place([config.image_token_id], [prepare(image, vision)], config.image_token_id)
            images.append(PlacedImage(len(tokens), placed[0].image))
            tokens += span
        return tokens, images


def _opened(part: Path | bytes | Image.Image, where: str, limits: ImageLimits) -> Image.Image:
    if isinstance(part, Image.Image):
        return part if part.mode == "RGB" else part.convert("RGB")
    return decode_image(part.read_bytes() if isinstance(part, Path) else part, limits, where)
