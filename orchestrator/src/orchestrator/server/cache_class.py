"""The `x-cache-class` header: how long what a request leaves in the prefix cache is kept."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.engine.request import CACHE_CLASSES
from orchestrator.server.errors import ApiError

HEADER = "x-cache-class"


def cache_class(headers: Mapping[str, str]) -> str:
    """The class that a request asks for, "chat" where it says nothing. Raises ApiError 400 for another."""
    given = headers.get(HEADER, "chat").strip().lower()
    if given not in CACHE_CLASSES:
        raise ApiError(400, f"{HEADER}: got {given[:40]!r}, allowed are {', '.join(CACHE_CLASSES)}")
    return given
