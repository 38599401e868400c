"""Encoded bytes to an image of three channels. Sizes are checked before a pixel is decoded."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from orchestrator.vision.errors import ImageRefused
from orchestrator.vision.limits import ImageLimits
from orchestrator.vision.webp import webp_size

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_UNREADABLE = "the image cannot be decoded; it is damaged, or none of PNG, JPEG, GIF and WebP"
_JPEG, _SCAN, _SCANS = b"\xff\xd8", b"\xff\xda", 64
"""Each scan of a progressive JPEG goes over the whole picture: hundreds are an attack, common files have ten. Other
pictures in the file, previews for instance, are counted with it."""
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, limits: ImageLimits, where: str) -> Image.Image:
    """The first frame, upright, as RGB on a white ground; 16 bits lose their lower half.

    The format is what the bytes say, whatever name or type they came under. Raises ImageRefused for a format that is
    not taken, for damage, and for more pixels than `limits` allow, before they are decoded.
    """
    if not data:
        raise ImageRefused(where, "the image is empty")
    if data.startswith(_JPEG) and data.count(_SCAN) > _SCANS:
        raise ImageRefused(where, f"the image has more than {_SCANS} scans")
    size = webp_size(data)  # the library makes room for a whole WebP canvas on opening it
    if size is not None:
        _check_size(*size, limits, where)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, limits, where)
            image.load()
            return _upright(image, _flat(image))
    except ImageRefused:
        raise
    except Image.DecompressionBombError:
        raise ImageRefused(where, f"the image has more than {limits.max_pixels} pixels") from None
    except MemoryError:
        raise
    except Exception:  # each decoder has its own ways to say that a file is damaged
        raise ImageRefused(where, _UNREADABLE) from None


def _check_size(width: int, height: int, limits: ImageLimits, where: str) -> None:
    if width < 1 or height < 1:
        raise ImageRefused(where, "the image has no pixels")
    if max(width, height) > limits.max_side:
        raise ImageRefused(where, f"the image is {width} x {height} pixels, allowed are {limits.max_side} a side")
    if width * height > limits.max_pixels:
        raise ImageRefused(where, f"the image has {width * height} pixels, allowed are {limits.max_pixels}")


def _flat(image: Image.Image) -> Image.Image:
    """Any mode as RGB."""
    if image.mode.startswith("I"):  # grey of 16 bits; the library's own conversion would clip it
        values = np.asarray(image)
        return Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _upright(source: Image.Image, image: Image.Image) -> Image.Image:
    """Turned as the camera's note says; a note that cannot be read is none."""
    try:
        turn = _TURNS.get(int(source.getexif().get(_ORIENTATION, 1)))
    except Exception:  # whatever a broken note makes the parser raise, the pixels are good
        turn = None
    return image if turn is None else image.transpose(turn)
