"""Images of requests on their way into an engine: encoded by a thread of their own, so that no text waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from orchestrator.engine.engine import Engine
from orchestrator.engine.image_spans import ImageSpan, PlacedImage
from orchestrator.engine.request import SamplingParams


class ImageQueue:
    """Encodes in the order of arrival. What nobody waits for any more is skipped and given back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "images")  # starts with the first image

    async def encode(self, images: Sequence[PlacedImage], params: SamplingParams) -> tuple[ImageSpan, ...]:
        """As `Engine.encode`. Raises EngineFull at once where too many patches are in work."""
        if not images or self._engine.images is None:
            return self._engine.encode(images, params)
        count, stop = self._engine.images.enter(images), threading.Event()
        future = self._thread.submit(self._encode, list(images), params, count, stop)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            stop.set()
            future.add_done_callback(lambda done: self._give_back(done, params))
            raise

    def close(self) -> None:
        """Skip what waits."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(
        self, images: list[PlacedImage], params: SamplingParams, count: int, stop: threading.Event
    ) -> tuple[ImageSpan, ...]:
        try:
            return self._engine.encode(images, params, stop)
        finally:
            if self._engine.images is not None:
                self._engine.images.leave(count)

    def _give_back(self, done: Future[tuple[ImageSpan, ...]], params: SamplingParams) -> None:
        if not done.cancelled() and done.exception() is None:
            self._engine.release(done.result(), params)
