"""API keys: who asks, checked in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from orchestrator.server.errors import ApiError
from orchestrator.server.settings import is_loopback

ANYBODY = "anybody"


class Keys:
    """The accepted keys. Only digests are kept, and every one is compared, so timing tells nothing."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def caller(self, headers: Mapping[str, str]) -> str:
        """A short name for the key in the headers, for limits and logs.

        Raises ApiError 401 for a wrong or no key. Without keys, 403 for a request that a web page may have made a
        browser send: its Host or Origin is not this machine's.
        """
        if not self._digests:
            _only_from_here(headers)
            return ANYBODY
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            message = "Wrong or missing API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, headers={"www-authenticate": "Bearer"})
        return _name(digest)


def caller_of(key: str) -> str:
    """The name that `Keys.caller` gives the holder of a key."""
    return _name(hashlib.sha256(key.encode()).digest())


def _name(digest: bytes) -> str:
    return digest.hex()[:12]


def _only_from_here(headers: Mapping[str, str]) -> None:
    for name in ("host", "origin"):
        value = headers.get(name)
        if value is not None and not is_loopback(urlsplit(value if "//" in value else f"//{value}").hostname or ""):
            raise ApiError(403, f"The {name} header is not this machine's; without an API key only it may ask")
