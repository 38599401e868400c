"""The FastAPI application: routes, error shapes and what holds for all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
from fastapi import FastAPI, HTTPException, Request
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import JSONResponse, Response

from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.server import docs
from orchestrator.server.api import CHAT, MESSAGES, RESPONSES, Api
from orchestrator.server.auth import ANYBODY, Keys
from orchestrator.server.body import read_body
from orchestrator.server.cache_class import cache_class
from orchestrator.server.convert import AwaitsImages, Converter, Prepared
from orchestrator.server.engine_protocol import AsyncEngineProtocol
from orchestrator.server.errors import ApiError, error_response
from orchestrator.server.generation import Generation
from orchestrator.server.health import add_health
from orchestrator.server.image_desk import ImageDesk
from orchestrator.server.limits import Limits
from orchestrator.server.metrics import Metrics
from orchestrator.server.settings import ServerSettings
from orchestrator.server.stream import ClientGone, ClosingResponse, sse, unless_gone
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.vision import ImageLimits, ImageReader

log = logging.getLogger("orchestrator.server")
_WORKERS = 4  # conversions at once; they hold the interpreter lock for part of their time


def create_app(
    engine: AsyncEngineProtocol,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    *,
    grammars: GrammarCompiler | None = None,
    images: ImageReader | None = None,
    collectors: Sequence[Collector] = (),
) -> FastAPI:
    """The HTTP application over one engine.

    Args:
        engine: see `AsyncEngineProtocol`. The caller starts and closes it.
        tokenizer: that of the model.
        settings: names and limits.
        grammars: the engine's compiler, so that a grammar is compiled once; None makes another.
        images: what reads the images of requests; None refuses them, as for a model of text alone.
        collectors: further numbers for `/metrics`.
    """
    app = FastAPI(title="Fathom", description=docs.DESCRIPTION, version=docs.version())
    server = _Server(engine, tokenizer, settings, grammars, images, collectors)
    for path, api, schema in (
        ("/v1/chat/completions", CHAT, docs.CHAT),
        ("/v1/responses", RESPONSES, docs.RESPONSES),
        ("/v1/messages", MESSAGES, docs.MESSAGES),
    ):
        app.add_api_route(path, server.handler(api), methods=["POST"], **docs.route(schema))
    app.add_api_route("/v1/messages/count_tokens", server.count_tokens, methods=["POST"], **docs.route(docs.COUNT))
    app.add_api_route("/v1/models", server.models, methods=["GET"], summary="The models served here")
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"], summary="One model")
    app.add_api_route("/metrics", server.metrics_page, methods=["GET"], summary="Numbers for Prometheus")
    add_health(app, engine, settings, server.limits)
    app.add_exception_handler(ApiError, server.on_api_error)
    app.add_exception_handler(StarletteHTTPException, server.on_http_error)
    app.add_exception_handler(Exception, server.on_crash)
    return app


class _Server:
    def __init__(
        self,
        engine: AsyncEngineProtocol,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        grammars: GrammarCompiler | None,
        images: ImageReader | None,
        collectors: Sequence[Collector],
    ) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.converter = Converter(tokenizer, settings, grammars, images)
        self.images = ImageDesk(self.converter, ImageLimits() if images is None else images.limits)
        self.limits = Limits(settings.max_requests, settings.requests_per_minute, settings.tokens_per_minute)
        self.metrics = Metrics(engine, self.limits, collectors)
        self.keys = Keys(settings.api_keys)
        self.workers = anyio.CapacityLimiter(_WORKERS)
        self.started = int(time.time())

    def handler(self, api: Api) -> Any:
        async def handle(request: Request) -> Response:
            response = await self._answer(api, request)
            self.metrics.requests.labels(api.name, str(response.status_code)).inc()
            return response

        handle.__name__ = api.name
        return handle

    async def _answer(self, api: Api, request: Request) -> Response:
        try:
            caller = self.keys.caller(request.headers)
            kept = cache_class(request.headers)
            raw = await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout)
            self.limits.enter(caller)
        except ApiError as error:
            return error_response(error, request.url.path)
        call = _Call(self, api, caller, kept)
        try:
            return await call.run(request, await unless_gone(request, self._prepared(api, raw)))
        except ApiError as error:
            return error_response(error, request.url.path)
        except ClientGone:
            return Response(status_code=499)
        finally:
            await call.settle()

    async def _prepared(self, api: Api, raw: bytes) -> Prepared:
        found = await self._in_worker(self.converter.prepare, api, raw)
        if isinstance(found, AwaitsImages):
            images = await self.images.read(found.sources)
            found = await self._in_worker(found.finish, images)
        assert isinstance(found, Prepared)
        return found

    async def _in_worker(self, work: Any, *args: Any) -> Any:
        return await anyio.to_thread.run_sync(work, *args, limiter=self.workers)

    async def count_tokens(self, request: Request) -> Response:
        self.keys.caller(request.headers)
        raw = await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout)
        found = await self._in_worker(self.converter.count_tokens, MESSAGES, raw)
        if isinstance(found, AwaitsImages):
            images = await self.images.read(found.sources)
            found = await self._in_worker(found.finish, images)
        return JSONResponse({"input_tokens": found})

    async def models(self, request: Request) -> dict[str, Any]:
        self.keys.caller(request.headers)
        models = [self._model(name) for name in self.settings.names]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
        return {"object": "list", "data": models, **ends}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        self.keys.caller(request.headers)
        if name not in self.settings.names:
            raise ApiError(404, f"No model named {name[:80]!r}; served here: {', '.join(self.settings.names)}")
        return self._model(name)

    def _model(self, name: str) -> dict[str, Any]:
        """One model in both protocols' words: OpenAI's fields, then Anthropic's."""
        openai = {"id": name, "object": "model", "created": self.started, "owned_by": "fathom"}
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started))
        return {**openai, "type": "model", "display_name": name, "created_at": made}

    async def metrics_page(self, request: Request) -> Response:
        self.keys.caller(request.headers)
        page = await self._in_worker(self.metrics.render)  # a collector may wait for another thread
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def on_api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error, request.url.path)

    async def on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException | StarletteHTTPException)
        headers = dict(error.headers or {})
        return error_response(ApiError(error.status_code, str(error.detail), headers=headers), request.url.path)

    async def on_crash(self, request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(ApiError(500, "Internal error; the server's log has the details"), request.url.path)


class _Call:
    """One admitted request: owns its slot and its generation until the answer is out."""

    def __init__(self, server: _Server, api: Api, caller: str, kept: str) -> None:
        self._server, self._api, self._caller, self._kept = server, api, caller, kept
        self._generation: Generation | None = None
        self._streaming = self._settled = False

    async def run(self, request: Request, prepared: Prepared) -> Response:
        server, api = self._server, self._api
        # A salt for each key: nobody can tell by times or usage what others have asked.
        salt = self._caller if self._caller != ANYBODY else ""
        prepared = replace(prepared, params=replace(prepared.params, cache_salt=salt, cache_class=self._kept))
        self._generation = Generation(api, prepared, server.engine, server.tokenizer, server.metrics)
        await unless_gone(request, self._generation.start(server.settings.ready_timeout))
        if not prepared.stream:
            return await unless_gone(request, self._collect(prepared.model))
        self._streaming = True
        return ClosingResponse(sse(api, self._generation, server.settings.keep_alive), self._close_stream)

    async def _collect(self, model: str) -> Response:
        generation = self._generation
        assert generation is not None
        whole = self._api.collector(generation.id, model, generation.prompt_tokens, generation.cached_tokens)
        async for events in generation.events():
            for event in events:
                whole.accumulate(event)
        return Response(whole.to_json(), media_type="application/json")

    async def _close_stream(self) -> None:
        self._streaming = False
        await self.settle()

    async def settle(self) -> None:
        """Give the slot back, once. While a stream is open that is left to the stream."""
        if self._streaming or self._settled:
            return
        self._settled = True
        if self._generation is not None:
            with anyio.CancelScope(shield=True):
                await self._generation.close()
        self._server.limits.leave(self._caller, self._generation.charge if self._generation is not None else 0)
