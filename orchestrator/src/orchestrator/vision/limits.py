"""What images of requests may cost."""

from __future__ import annotations

import ipaddress

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_PIXELS = 178_956_970
"""Beyond this the decoding library takes every image for an attack."""


class ImageLimits(BaseModel):
    """Limits of one server. Every one is finite.

    Attributes:
        max_images: in one request.
        max_image_bytes, max_total_bytes: encoded, of one image and of all images of a request.
        max_side, max_pixels: of one image, decoded.
        low_detail_side: pixels of the longer side of an image that is sent with low detail.
        fetch: whether images may be given by URL.
        fetch_seconds: until all images of a request have come.
        fetches: at once, over all requests.
        workers: requests whose images are read at once.
        networks: addresses beside the public ones that URLs may lead to, for instance "10.1.0.0/16" for a picture
            store of one's own. Empty keeps them all out.
        refused_networks: public addresses that URLs may not lead to, for instance the server's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_images: int = Field(default=64, ge=1)
    max_image_bytes: int = Field(default=32 * 2**20, ge=1)
    max_total_bytes: int = Field(default=64 * 2**20, ge=1)
    max_side: int = Field(default=8192, ge=1)
    max_pixels: int = Field(default=2**26, ge=1, le=MOST_PIXELS)
    low_detail_side: int = Field(default=512, ge=1)
    fetch: bool = True
    fetch_seconds: float = Field(default=20.0, gt=0, le=55)
    fetches: int = Field(default=8, ge=1, le=256)
    workers: int = Field(default=2, ge=1, le=64)
    networks: tuple[str, ...] = ()
    refused_networks: tuple[str, ...] = ()

    @field_validator("networks", "refused_networks")
    @classmethod
    def _networks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            ipaddress.ip_network(name)  # its ValueError names what came
        return names
