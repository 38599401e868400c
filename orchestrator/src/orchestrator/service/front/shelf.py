"""Prepared images of running requests, for the encoders that ask for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from orchestrator.engine.request import EngineFull
from orchestrator.model.vision.image import PreparedImage
from orchestrator.roles.messages import Image


class Shelf:
    """Images by the digest of their pixels in hex, each there once, until the last request with it ends. Thread-safe.

    `capacity` bytes of pixels; one request's images are taken by an empty shelf however large they are.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.size = capacity, 0
        self._lock = threading.Lock()
        self._images: dict[str, PreparedImage] = {}
        self._holders: dict[str, set[str]] = {}  # requests, by digest
        self._digests: dict[str, tuple[str, ...]] = {}  # by request

    def put(self, request: str, images: Iterable[PreparedImage]) -> tuple[Image, ...]:
        """Keep a request's images until `release`; the distinct ones, in order. Raises EngineFull for lack of room."""
        given = {image.digest.hex(): image for image in images}
        with self._lock:
            new = sum(image.pixels.nbytes for digest, image in given.items() if digest not in self._images)
            if self.size and self.size + new > self.capacity:
                raise EngineFull(
                    f"images of running requests take {self.size} bytes, and {new} more are too many; try again later"
                )
            self.size += new
            self._digests[request] = tuple(given)
            for digest, image in given.items():
                self._images.setdefault(digest, image)
                self._holders.setdefault(digest, set()).add(request)
        return tuple(Image(digest, image.geometry.patches) for digest, image in given.items())

    def get(self, digest: str) -> PreparedImage | None:
        with self._lock:
            return self._images.get(digest)

    def release(self, request: str) -> None:
        """A request has ended. Unknown ones are no error."""
        with self._lock:
            for digest in self._digests.pop(request, ()):
                holders = self._holders[digest]
                holders.discard(request)
                if not holders:
                    del self._holders[digest]
                    self.size -= self._images.pop(digest).pixels.nbytes

    def __len__(self) -> int:
        return len(self._images)
