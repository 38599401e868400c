"""Offline use: texts or token ids in, finished texts out."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.engine.request import Event, Finished, FinishReason, SamplingParams, TokenOutput
from orchestrator.model.record import Recorder
from orchestrator.vision.prompt import ImagePrompt

Prompt = str | list[int] | ImagePrompt


@dataclass
class RequestOutput:
    """One finished request, in the order of the prompts.

    `token_ids` leaves out the token that ended the text (`stop_token`); `logprobs` stands beside them when asked for,
    `top_logprobs` likewise; `record` is what `generate(..., record=True)` saw of the forward passes.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "error"
    stop_sequence: str | None = None
    stop_token: int | None = None
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    record: dict[str, torch.Tensor] | None = None


class LLM:
    """A model in this process.

    Args:
        model: folder of a checkpoint (`config.json`, safetensors, `tokenizer.json`).
        options: fields of `EngineConfig`, for instance ``max_num_seqs=32`` or ``device="cuda"``.

    Example:
        >>> from orchestrator import LLM, SamplingParams
        >>> llm = LLM("models/v41-mini")
        >>> llm.generate(["def f(x):"], SamplingParams(max_tokens=8, seed=1))[0].text
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        from orchestrator.model.load import load_model
        from orchestrator.text.tokenizer import load_tokenizer

        config = EngineConfig(**options)
        self.tokenizer = load_tokenizer(model)
        self.engine = Engine(load_model(model, dense=config.dense, device=config.device), self.tokenizer, config)
        self._ids = count()
        self._inboxes: dict[str, deque[Event]] = {}  # one for each request that somebody reads

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        record: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt, text, token ids or an `ImagePrompt`; results come in the order of the prompts.

        `params` is one for all or one a prompt. `progress` shows a bar (default: when stderr is a terminal). `record`
        keeps each request's cache bytes, index sets, expert choices and logits.

        Raises `ValueError` before anything runs when a prompt can never run.
        """
        batch = _as_list(prompts)
        settings = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(settings) != len(batch):
            raise ValueError(f"params: got {len(settings)}, allowed is one, or one for each of {len(batch)} prompts")
        requests = [
            _Request(f"{next(self._ids)}", *self._encode(prompt), setting, Recorder() if record else None)
            for prompt, setting in zip(batch, settings, strict=True)
        ]
        for request in requests:
            self._check(request)
        results = {request.id: RequestOutput(request.prompt) for request in requests}
        bar = _bar(len(requests), sys.stderr.isatty() if progress is None else progress)
        with bar as advance, closing(self._run(requests)) as events:
            for event in events:
                apply_event(results[event.request_id], event)
                advance(event)
        for request in requests:
            if request.recorder is not None:
                results[request.id].record = request.recorder.export()
        return list(results.values())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Events of one request as they happen; leaving the loop early aborts it.

        Raises `ValueError` at once when the prompt can never run.
        """
        request = _Request(f"{next(self._ids)}", *self._encode(prompt), params or SamplingParams(), None)
        self._check(request)
        return self._run([request])

    def _encode(self, prompt: Prompt) -> tuple[list[int], list[PlacedImage]]:
        if isinstance(prompt, ImagePrompt):
            return prompt.place(self.tokenizer.encode, self.engine.model.config)
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt), []

    def _check(self, request: _Request) -> None:
        self.engine.check(request.prompt, request.params, request.images)
        self.engine.compile(request.params)

    def _run(self, requests: list[_Request]) -> Generator[Event, None, None]:
        """Events of these requests until all have ended. Other readers' requests move along with them."""
        waiting = deque(requests)
        unfinished = {request.id for request in requests}
        inbox: deque[Event] = deque()
        self._inboxes.update(dict.fromkeys(unfinished, inbox))
        try:
            while unfinished:
                while waiting and len(self.engine.scheduler.waiting) < self.engine.config.max_waiting:
                    request = waiting.popleft()
                    self._add(request)
                if not inbox:
                    self._deal(self.engine.step())
                while inbox:
                    event = inbox.popleft()
                    if isinstance(event, Finished):
                        unfinished.discard(event.request_id)
                    yield event
        finally:
            for request in requests:
                self.engine.abort(request.id)
                del self._inboxes[request.id]
            self._deal(self.engine.take_events())

    def _add(self, request: _Request) -> None:
        images, request.images = request.images, []  # of the pixels there is no more need
        self.engine.add(request.id, request.prompt, request.params, recorder=request.recorder, images=images)

    def _deal(self, events: list[Event]) -> None:
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)


@dataclass
class _Request:
    id: str
    prompt: list[int]
    images: list[PlacedImage]
    params: SamplingParams
    recorder: Recorder | None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | ImagePrompt):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], int) else batch


def apply_event(result: RequestOutput, event: Event) -> None:
    """Add to a request's output what an event of it brings."""
    if isinstance(event, TokenOutput):
        result.token_ids.append(event.token_id)
        result.text += event.text
        if event.logprob is not None:
            result.logprobs.append(event.logprob)
            result.top_logprobs.append(event.top_logprobs)
    elif isinstance(event, Finished):
        result.text += event.text
        result.finish_reason, result.error = event.reason, event.error
        result.stop_sequence, result.stop_token = event.stop_sequence, event.stop_token
        result.prompt_logprobs = list(event.prompt_logprobs)


class _bar:
    """Finished requests and tokens a second, or nothing."""

    def __init__(self, total: int, shown: bool) -> None:
        self._shown, self._total, self._tokens = shown, total, 0

    def __enter__(self) -> Any:
        if not self._shown:
            return lambda event: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("generate"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("generate", total=self._total, tokens=0)
        return self._advance

    def _advance(self, event: Event) -> None:
        self._tokens += isinstance(event, TokenOutput)
        self._progress.update(self._task, advance=isinstance(event, Finished), tokens=self._tokens)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()
