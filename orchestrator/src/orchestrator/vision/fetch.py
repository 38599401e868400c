"""Images from URLs, by deepseek-recipe's fetcher with a filter on addresses.

It follows at most five redirects, asks the filter about each, reads no more than the limit, and gives up after a
minute; a reader waits less long. What went wrong is told in one and the same way, since "refused" and "does not answer"
would tell strangers which machines there are.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

import deepseek_recipe as recipe

from orchestrator.vision.addresses import destination_filter
from orchestrator.vision.data_url import too_large
from orchestrator.vision.errors import ImageRefused
from orchestrator.vision.limits import ImageLimits

_LONGEST = 8192  # characters of a URL


class Fetcher:
    """Fetches in a few threads. Thread-safe."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        filtered = destination_filter(limits.networks, limits.refused_networks)
        plain = recipe.ReqwestImageFetcher.with_max_bytes(limits.max_image_bytes)
        self._fetcher = plain.with_destination_filter(filtered)
        self._threads = ThreadPoolExecutor(limits.fetches, "fetch-image")

    def start(self, url: str, where: str) -> Future[bytes]:
        """Begin to fetch. Raises ImageRefused for what is no URL to try, and so does the future for what goes wrong."""
        check_url(url, where, allowed=self._limits.fetch)
        return self._threads.submit(self._fetch, url, where)

    def close(self) -> None:
        """Drop what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, url: str, where: str) -> bytes:
        try:
            return self._fetcher.fetch(url)
        except recipe.ImageError as error:
            if error.kind == "ImageTooLarge":
                raise too_large(self._limits.max_image_bytes, where) from None
            raise not_fetched(where) from None


def check_url(url: str, where: str, *, allowed: bool = True) -> None:
    """Raise ImageRefused unless `url` is one that may be tried."""
    if not allowed:
        raise ImageRefused(where, "this server fetches no images; send the image itself, as a base64 data URL")
    if len(url) > _LONGEST:
        raise ImageRefused(where, f"the URL has {len(url)} characters, allowed are {_LONGEST}")
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        known = False
    if not known:
        raise ImageRefused(where, "allowed are http and https URLs without a user name, and data URLs")


def not_fetched(where: str) -> ImageRefused:
    return ImageRefused(where, "the image could not be fetched from its URL; only public addresses are tried")
