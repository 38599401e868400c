"""Images into a prompt: each placeholder becomes the run of tokens that its image takes."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_core.check import require
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.model.vision.image import PreparedImage


def place(
    tokens: Sequence[int], images: Sequence[PreparedImage], image_token_id: int
) -> tuple[list[int], list[PlacedImage]]:
    """The prompt with its images in the order of their placeholders.

    Raises ValueError unless there are as many placeholders (`image_token_id` in `tokens`) as images.
    """
    count = sum(token == image_token_id for token in tokens)
    require(count == len(images), "images", f"{len(images)} for {count} placeholders", "one for each")
    prompt: list[int] = []
    placed: list[PlacedImage] = []
    for token in tokens:
        if token != image_token_id:
            prompt.append(token)
            continue
        image = images[len(placed)]
        placed.append(PlacedImage(len(prompt), image))
        prompt += [image_token_id] * image.geometry.tokens
    return prompt, placed
