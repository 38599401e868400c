"""Options about images, as the settings that they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.commands.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.commands.serve import ServeOptions
    from orchestrator.vision import ImageLimits

_OPTIONS = {
    "max_images": "--max-images",
    "max_image_bytes": "--max-image-mb",
    "max_pixels": "--max-image-mpixels",
    "networks": "--image-network",
}


def image_limits_of(options: ServeOptions) -> ImageLimits:
    """The limits that the options of `fathom serve` ask for. Raises UsageError naming the option that is wrong."""
    from pydantic import ValidationError

    from orchestrator.vision import ImageLimits

    defaults = ImageLimits()
    size = int(options.max_image_mb * 2**20)
    try:
        return ImageLimits(
            max_images=options.max_images,
            max_image_bytes=size,
            max_total_bytes=max(size, defaults.max_total_bytes),
            max_pixels=int(options.max_image_mpixels * 2**20),
            fetch=options.image_urls,
            networks=options.image_network,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{_OPTIONS.get(str(first['loc'][0]), first['loc'][0])}: {first['msg']}") from None
