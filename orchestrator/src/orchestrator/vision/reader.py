"""All images of a request, from their sources to canvases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

import deepseek_recipe as recipe

from orchestrator.model.config import ModelConfig
from orchestrator.model.vision.image import PreparedImage, prepare
from orchestrator.vision.data_url import decode_data_url, too_large
from orchestrator.vision.decode import decode_image
from orchestrator.vision.errors import ImageRefused, megabytes
from orchestrator.vision.fetch import Fetcher, not_fetched
from orchestrator.vision.limits import ImageLimits


class ImageReader:
    """Reads images for one model. Thread-safe; it waits for the network, so not on an event loop.

    Attributes:
        image_token_id: what stands for an image in a prompt.
    """

    def __init__(self, config: ModelConfig, limits: ImageLimits | None = None) -> None:
        """Raises ValueError for a model without image encoder."""
        if config.vision is None:
            raise ValueError("config: got a model without vision_config, allowed is one with an image encoder")
        self.vision, self.image_token_id = config.vision, config.image_token_id
        self.limits = limits or ImageLimits()
        self._fetcher = Fetcher(self.limits)

    def read(self, sources: Sequence[recipe.ImageSource]) -> list[PreparedImage]:
        """The images in their order. Raises ImageRefused, which names the place in the request, for the first bad one.

        Nothing is decoded before the bytes of all are here and counted.
        """
        self.check_count(len(sources))
        deadline = time.monotonic() + self.limits.fetch_seconds
        coming: dict[str, Future[bytes]] = {}
        try:
            for source in sources:
                if source.kind == "url" and source.url is not None and source.url not in coming:
                    coming[source.url] = self._fetcher.start(source.url, _place(source))
            contents: list[bytes] = []
            total = 0
            for source in sources:
                contents.append(self._bytes(source, coming, deadline))
                total += len(contents[-1])
                if total > self.limits.max_total_bytes:
                    most = megabytes(self.limits.max_total_bytes)
                    raise ImageRefused(
                        _place(source), f"the images of this request are larger than {most} together", 413
                    )
        finally:
            for future in coming.values():
                future.cancel()
        return [self._prepared(content, source) for content, source in zip(contents, sources, strict=True)]

    def check_count(self, count: int) -> None:
        """Raise ImageRefused for more images than a request may have."""
        if count > self.limits.max_images:
            raise ImageRefused("", f"the request has {count} images, allowed are {self.limits.max_images}")

    def close(self) -> None:
        """Fetch no more."""
        self._fetcher.close()

    def _bytes(self, source: recipe.ImageSource, coming: dict[str, Future[bytes]], deadline: float) -> bytes:
        where, limit = _place(source), self.limits.max_image_bytes
        if source.kind == "url" and source.url is not None:
            try:
                return coming[source.url].result(max(0.0, deadline - time.monotonic()))
            except NotYet:
                raise not_fetched(where) from None
        if source.kind == "data_url" and source.data_url is not None:
            return decode_data_url(source.data_url, limit, where)
        if source.data is None:
            raise ImageRefused(where, f"got an image of kind {source.kind!r}, which is not known here")
        if len(source.data) > limit:
            raise too_large(limit, where)
        return source.data

    def _prepared(self, content: bytes, source: recipe.ImageSource) -> PreparedImage:
        image = decode_image(content, self.limits, _place(source))
        return prepare(image, self.vision, longest=self.limits.low_detail_side if source.detail == "low" else None)


def _place(source: recipe.ImageSource) -> str:
    """Where in the request the image stands."""
    return source.path.lstrip(".") or "image"
