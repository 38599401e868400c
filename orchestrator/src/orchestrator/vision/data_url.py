"""Bytes out of a `data:` URL."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from orchestrator.vision.errors import ImageRefused, megabytes

_HEAD = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
_SPACE = re.compile(rb"[ \t\r\n\f]+")


def decode_data_url(url: str, limit: int, where: str) -> bytes:
    """The content, at most `limit` bytes; the type that it declares says nothing. Raises ImageRefused otherwise."""
    head = _HEAD.match(url)
    if head is None:
        raise ImageRefused(where, "not a data URL; it begins with data:image/png;base64, or the like")
    in_base64 = head[1].lower().rstrip().endswith(";base64")
    # The least that so many characters can stand for: three bytes for four, or one for an escape of three.
    if (len(url) - head.end()) * (0.7 if in_base64 else 1 / 3) > limit + 4 and "%" not in url[head.end() :]:
        raise too_large(limit, where)
    content = unquote_to_bytes(url[head.end() :])
    if in_base64:
        content = _SPACE.sub(b"", content)
        try:
            content = base64.b64decode(content + b"=" * (-len(content) % 4), validate=True)
        except binascii.Error:
            raise ImageRefused(where, "not valid base64") from None
    if len(content) > limit:
        raise too_large(limit, where)
    return content


def too_large(limit: int, where: str) -> ImageRefused:
    return ImageRefused(where, f"the image is larger than {megabytes(limit)}", 413)
