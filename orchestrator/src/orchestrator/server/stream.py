"""Server-sent events that survive slow engines and vanishing clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.server.api import Api
from orchestrator.server.errors import ApiError, stream_error
from orchestrator.server.generation import Generation

T = TypeVar("T")
_COMMENT = b": keep-alive\n\n"


class ClientGone(Exception):
    """The client closed its connection."""


class ClosingResponse(StreamingResponse):
    """Closes its body and calls `closing` when the answer ends, for whatever reason and even before it began."""

    def __init__(self, body: AsyncGenerator[bytes, None], closing: Callable[[], Awaitable[None]]) -> None:
        super().__init__(body, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._body, self._closing = body, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._body.aclose()
                await self._closing()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def sse(api: Api, generation: Generation, keep_alive: float) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream: one message an event, comments in silence, an error event if the engine fails."""
    source = generation.events()
    timed = _with_silence(source, keep_alive)
    try:
        async for events in timed:
            if events is None:
                yield _COMMENT
            else:
                yield b"".join(_message(api.response.sse_event_name(event), event.to_json()) for event in events)
        if done := api.response.sse_done_data():
            yield _message(None, done)
    except ApiError as error:
        yield stream_error(error, api.name)
    finally:
        with anyio.CancelScope(shield=True):
            await timed.aclose()  # this one first: it may be waiting inside the other
            await source.aclose()


def _message(name: str | None, data: str) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


async def _with_silence(source: AsyncIterator[Any], limit: float) -> AsyncGenerator[Any, None]:
    """Items of `source`, and None each time nothing came for `limit` seconds."""
    pending: asyncio.Future[Any] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait({pending}, timeout=limit)
            if not done:
                yield None
                continue
            ready, pending = pending, None
            try:
                item = ready.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await pending
