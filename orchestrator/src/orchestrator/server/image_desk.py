"""Images of requests are read by workers of their own: a slow download must not keep text waiting."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import deepseek_recipe as recipe

from orchestrator.model.vision.image import PreparedImage
from orchestrator.server.convert import Converter
from orchestrator.server.errors import busy
from orchestrator.vision import ImageLimits

_RETRY_S = 5.0


class ImageDesk:
    """Reads the images of a few requests at once, and lets as many wait as would have their turn in time."""

    def __init__(self, converter: Converter, limits: ImageLimits) -> None:
        self._converter, self._seconds = converter, limits.fetch_seconds
        self._workers = anyio.CapacityLimiter(limits.workers)

    async def read(self, sources: Sequence[recipe.ImageSource]) -> list[PreparedImage]:
        """As `Converter.read_images`. Raises ApiError 503 where no worker is free for as long as downloads may take."""
        turn = object()
        with anyio.move_on_after(self._seconds) as waiting:
            await self._workers.acquire_on_behalf_of(turn)
        if waiting.cancelled_caught:
            raise busy("Too many images are being read; try again later", _RETRY_S, 503)
        try:
            return await anyio.to_thread.run_sync(self._converter.read_images, sources)
        finally:
            self._workers.release_on_behalf_of(turn)
