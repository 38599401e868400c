"""What the server asks of an engine. `orchestrator.engine.async_engine.AsyncEngine` is one; tests bring another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from orchestrator.engine.image_spans import PlacedImage
from orchestrator.engine.request import Event, SamplingParams


class EngineProgress(Protocol):
    """See `orchestrator.engine.async_engine.Progress`."""

    @property
    def has_work(self) -> bool: ...
    @property
    def last_step(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def failed(self) -> str | None: ...
    def stalled(self, limit: float) -> bool: ...


class AsyncEngineProtocol(Protocol):
    """An engine behind an event loop.

    `generate` yields `Ready` first and `Finished` last; closing the iterator early (`aclose`) aborts the request. It
    raises `ValueError` for what can never run, `EngineFull` when the queue is full, `RuntimeError` when the engine
    has died. `images` are those of the prompt, a list that it may empty once it has what it needs of them; an engine
    of a model without image encoder is never given any, and need not take them.
    """

    def generate(
        self, request_id: str, prompt: list[int], params: SamplingParams, images: list[PlacedImage] = ...
    ) -> AsyncIterator[Event]: ...

    @property
    def progress(self) -> EngineProgress: ...
