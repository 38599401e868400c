"""Images of an engine's requests: encoded once, kept while there is room, refused when there is too much to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orchestrator.balance.vision import Encoders
from orchestrator.cache.chain import ImageRun, framed
from orchestrator.engine.image_spans import ImageSpan, PlacedImage
from orchestrator.engine.image_store import ImageStore
from orchestrator.engine.request import EngineFull
from orchestrator.model.vision.encoder import VisionEncoder

_HERE = "here"


@dataclass(frozen=True)
class ImageCounters:
    """Since the start: images taken, found encoded, given up; patches encoded and the seconds that took. Now: bytes of
    embeddings, those that requests hold, and patches in work."""

    images: int = 0
    hits: int = 0
    evictions: int = 0
    patches: int = 0
    seconds: float = 0.0
    bytes: int = 0
    held_bytes: int = 0
    patches_in_work: int = 0


class Images:
    """One encoder, the embeddings that it made, and the work that waits for it. Thread-safe.

    Without encoder (None) all embeddings come from elsewhere (`adopt`).

    `capacity` bytes of embeddings; `most` patches that wait or are encoded at once, as in `balance.vision.Encoders`.
    """

    def __init__(self, encoder: VisionEncoder | None, capacity: int, most: int) -> None:
        self.encoder, self.store = encoder, ImageStore(capacity)
        self._work = Encoders(most)
        self._work.add(_HERE)
        self._lock = threading.Lock()
        self._patches, self._seconds = 0, 0.0

    def enter(self, images: Sequence[PlacedImage]) -> int:
        """Announce images to be encoded; `leave` takes the number that comes back. Raises EngineFull if it is many."""
        count = sum(placed.image.geometry.patches for placed in images)
        with self._lock:
            if count and self._work.assign(count) is None:
                waiting = self._work.work[_HERE]
                raise EngineFull(
                    f"{waiting} patches of images are in work, and {count} more are too many; try again later"
                )
        return count

    def leave(self, count: int) -> None:
        with self._lock:
            self._work.done(_HERE, count)

    def encode(
        self, images: Sequence[PlacedImage], salt: str = "", stop: threading.Event | None = None
    ) -> tuple[ImageSpan, ...]:
        """The spans of a request's images, held until `release`. Images of different salts are kept apart.

        Raises what `ImageStore.hold` does, and EngineFull once `stop` was set; nothing is held then.
        """
        spans: list[ImageSpan] = []
        try:
            for placed in images:
                if stop is not None and stop.is_set():
                    raise EngineFull("the request is not wanted any more")
                spans.append(self._span(placed, salt))
        except BaseException:
            self.release(spans, salt)
            raise
        return tuple(spans)

    def adopt(self, runs: Sequence[ImageRun], rows: Sequence[torch.Tensor], salt: str = "") -> tuple[ImageSpan, ...]:
        """The spans of images that were encoded elsewhere, held until `release`. Raises as `encode`, with nothing held.

        `rows` are their embeddings, bfloat16 [tokens, d] in host memory.
        """
        spans: list[ImageSpan] = []
        try:
            for run, made in zip(runs, rows, strict=True):
                held = self.store.hold(_key(run.digest, salt), made.nbytes, lambda made=made: made)  # type: ignore[misc]
                spans.append(ImageSpan(run, held))
        except BaseException:
            self.release(spans, salt)
            raise
        return tuple(spans)

    def release(self, spans: Sequence[ImageSpan], salt: str = "") -> None:
        """A request needs its spans no more."""
        for span in spans:
            self.store.release(_key(span.run.digest, salt))

    @property
    def counters(self) -> ImageCounters:
        store = self.store
        return ImageCounters(
            images=store.hits + store.misses,
            hits=store.hits,
            evictions=store.evictions,
            patches=self._patches,
            seconds=self._seconds,
            bytes=store.size,
            held_bytes=store.held,
            patches_in_work=self._work.work[_HERE],
        )

    def _span(self, placed: PlacedImage, salt: str) -> ImageSpan:
        image, size, encoder = placed.image, placed.image.geometry, self.encoder
        if encoder is None:
            raise ValueError("images: got pixels, allowed are embeddings, since the image encoder is elsewhere")

        def make() -> torch.Tensor:
            began = time.perf_counter()
            rows = encoder.encode(image)
            with self._lock:
                self._patches += size.patches
                self._seconds += time.perf_counter() - began
            return rows

        rows = self.store.hold(_key(image.digest, salt), encoder.row_bytes(image), make)
        return ImageSpan(ImageRun(placed.start, size.tokens, image.digest, size.width, size.height), rows)


def _key(digest: bytes, salt: str) -> bytes:
    """Salted, since the time that an image takes would tell another tenant whether it was seen before."""
    return framed(salt.encode(), digest)
