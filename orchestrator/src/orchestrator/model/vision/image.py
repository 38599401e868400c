"""An image as the encoder reads it: fitted into its canvas, three bytes a pixel, named by a digest of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from PIL import Image

from kernel_core.check import require
from orchestrator.model.config import VisionConfig
from orchestrator.model.vision.geometry import Geometry, fit

GREY = 127
"""Of the canvas around an image."""


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """`pixels` uint8 [height, width, 3] (RGB) of the canvas that `geometry` describes."""

    pixels: npt.NDArray[np.uint8]
    geometry: Geometry

    def __post_init__(self) -> None:
        got, wanted = (self.pixels.dtype, self.pixels.shape), (self.geometry.height, self.geometry.width, 3)
        require(got == (np.uint8, wanted), "pixels", f"{got[0]} {got[1]}", f"uint8 {wanted}")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the size and all pixels: equal digests mean equal rows from one encoder."""
        size = f"{self.geometry.width} {self.geometry.height} ".encode()
        return hashlib.sha256(size + np.ascontiguousarray(self.pixels).tobytes()).digest()


def prepare(image: Image.Image, vision: VisionConfig, *, longest: int | None = None) -> PreparedImage:
    """Fit an image of mode RGB into its canvas: aspect kept, bicubic, centred, grey around it.

    `longest` bounds the longer side before the canvas is chosen (an image of low detail); None does not. Raises
    ValueError for another mode.
    """
    require(image.mode == "RGB", "image", f"mode {image.mode}", "RGB")
    width, height = image.size
    if longest is not None and max(width, height) > longest:
        scale = longest / max(width, height)
        width, height = max(1, int(width * scale + 0.5)), max(1, int(height * scale + 0.5))
    geometry = fit(width, height, vision)
    size = _contained(image.size, geometry)
    scaled = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    out = np.full((geometry.height, geometry.width, 3), GREY, dtype=np.uint8)
    # An odd gap is halved to the even number.
    left, top = round((geometry.width - size[0]) / 2), round((geometry.height - size[1]) / 2)
    out[top : top + size[1], left : left + size[0]] = np.asarray(scaled)
    return PreparedImage(out, geometry)


def _contained(size: tuple[int, int], geometry: Geometry) -> tuple[int, int]:
    """The largest size of the same aspect inside the canvas, at least one pixel each way."""
    width, height = size
    if width * geometry.height > height * geometry.width:
        return geometry.width, max(1, min(geometry.height, round(height / width * geometry.width)))
    return max(1, min(geometry.width, round(width / height * geometry.height))), geometry.height
