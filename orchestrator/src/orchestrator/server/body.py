"""Reading a request body with a limit on size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from orchestrator.server.errors import ApiError


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The whole body. Raises ApiError 413 above `limit` bytes, without reading on, and 408 after `timeout` seconds."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    try:
        return await asyncio.wait_for(_collect(request, limit), timeout)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {timeout:g} seconds", headers=_CLOSE) from None
    except ClientDisconnect:
        raise ApiError(400, "The client left before its body was complete") from None


async def _collect(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


_CLOSE = {"connection": "close"}


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes", headers=_CLOSE)
