"""One request at the engine: events in, protocol events out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import deepseek_recipe as recipe

from orchestrator.engine.request import EngineFull, Finished, Ready, TokenOutput
from orchestrator.server.api import Api
from orchestrator.server.convert import Prepared
from orchestrator.server.engine_protocol import AsyncEngineProtocol
from orchestrator.server.errors import ApiError, busy
from orchestrator.server.metrics import Metrics
from orchestrator.text.tokenizer import Tokenizer

_REASONS = {"stop": recipe.InferenceFinishReason.Stop, "length": recipe.InferenceFinishReason.Length}


class Generation:
    """Runs one prepared request. `start` waits for the engine's first sign, `events` yields protocol events.

    Closing `events`, or `close` itself, aborts the request at the engine. Stop strings are found by the recipe's
    parser, which knows text from markup; the engine is stopped as soon as it has seen enough.
    """

    def __init__(
        self, api: Api, prepared: Prepared, engine: AsyncEngineProtocol, tokenizer: Tokenizer, metrics: Metrics
    ) -> None:
        self.id = api.new_id()
        self.prompt_tokens = len(prepared.prompt)
        self.cached_tokens = self.output_tokens = 0
        self._api, self._prepared, self._tokenizer, self._metrics = api, prepared, tokenizer, metrics
        given = (self.id, prepared.prompt, prepared.params)
        self._source: Any = (
            engine.generate(*given, images=prepared.images) if prepared.images else engine.generate(*given)
        )
        self._began = time.monotonic()
        self._reason = "abort"
        generator = api.generator(prepared.converted, self.id, prepared.model, prepared.extra)
        self._parser = recipe.StreamProcessor(generator, prepared.converted.parsing_options, tokenizer.recipe)

    @property
    def charge(self) -> int:
        """Tokens that count against a rate limit."""
        return self.prompt_tokens - self.cached_tokens + self.output_tokens

    async def start(self, timeout: float) -> None:
        """Wait until the engine took the request. Raises ApiError: 400 impossible, 429 full, 503 late or dead."""
        try:
            first = await asyncio.wait_for(anext(self._source), timeout)
        except EngineFull as error:
            raise busy(str(error), error.retry_after, error.status) from None
        except ValueError as error:
            raise ApiError(400, f"Invalid request: {error}") from None
        except TimeoutError:
            raise busy("The request waited too long and was dropped; try again later", 5.0, 503) from None
        except (RuntimeError, StopAsyncIteration) as error:
            raise busy(f"The engine does not answer: {error}", 5.0, 503) from None
        if isinstance(first, Finished):
            self._check(first)
        if not isinstance(first, Ready):
            raise ApiError(500, "The engine broke its order of events")
        self.prompt_tokens, self.cached_tokens = first.prompt_tokens, first.cached_tokens
        self._metrics.prompt_tokens.inc(first.prompt_tokens)
        self._metrics.cached_tokens.inc(first.cached_tokens)

    async def events(self) -> AsyncGenerator[list[Any], None]:
        """Protocol events as they come, in lists. Raises ApiError 500 if the engine fails on the way."""
        usage = recipe.PromptUsage(prompt_tokens=self.prompt_tokens, prompt_cache_hit_tokens=self.cached_tokens)
        yield self._parser.push(recipe.InferenceChunk.ready(prompt_usage=usage))
        try:
            async for event in self._source:
                if isinstance(event, TokenOutput):
                    made = self._token(event)
                elif isinstance(event, Finished):
                    made = self._end(event)
                else:
                    continue
                if made:
                    yield made
                if self._parser.finished:
                    break
        except (RuntimeError, ValueError) as error:
            self._reason = "error"
            raise ApiError(500, f"The engine failed: {error}") from None
        if self._parser.finished and self._reason == "abort":
            self._reason = "stop"
        yield self._parser.finish()

    async def close(self) -> None:
        """Give everything back. Aborts the request if it still runs."""
        with contextlib.suppress(Exception):
            await self._source.aclose()
        self._parser.close()
        self._metrics.duration.observe(time.monotonic() - self._began)
        self._metrics.finished.labels(self._api.name, self._reason).inc()

    def _token(self, event: TokenOutput) -> list[Any]:
        if self.output_tokens == 0:
            self._metrics.first_token.observe(time.monotonic() - self._began)
        self.output_tokens += 1
        self._metrics.output_tokens.inc()
        if self._tokenizer.is_control(event.token_id):
            return self._parser.push(recipe.InferenceChunk.text("", 1))  # counted, never shown
        logprobs = None
        if self._prepared.params.logprobs is not None and event.logprob is not None:
            logprobs = [(event.logprob, list(event.top_logprobs))]
        return self._parser.push(recipe.InferenceChunk.tokens([event.token_id], logprobs))

    def _end(self, event: Finished) -> list[Any]:
        self._check(event)
        self._reason = event.reason
        return self._parser.push(recipe.InferenceChunk.finish(_REASONS[event.reason]))

    def _check(self, event: Finished) -> None:
        if event.reason not in _REASONS:
            self._reason = event.reason
            raise ApiError(500, f"The engine ended the request: {event.error or event.reason}")
