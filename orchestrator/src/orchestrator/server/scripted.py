"""An engine without a model: it says what it is told. For trying clients and testing the server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

import numpy as np

from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.engine.request import EngineFull, Event, Finished, FinishReason, Ready, SamplingParams, TokenOutput
from orchestrator.text.tokenizer import Tokenizer

Script = Callable[[list[int], SamplingParams], list[int]]


@dataclass(frozen=True)
class ScriptedProgress:
    """As the real engine's."""

    has_work: bool
    last_step: float
    steps: int
    running: int
    waiting: int = 0
    failed: str | None = None

    def stalled(self, limit: float) -> bool:
        return self.has_work and time.monotonic() - self.last_step > limit


class ScriptedEngine:
    """Answers each prompt with the tokens of `script`, or with a random text that the request's grammar allows.

    Attributes to set:
        delay: seconds a token.
        capacity: requests at once; one more raises EngineFull.
        cached: prompt tokens that it claims to have had in its cache.
        fail_after: number of tokens after which a request ends in an error.
        hold: requests wait for this event before they begin.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script, *, grammars: GrammarCompiler | None = None) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.grammars = grammars or GrammarCompiler(tokenizer)
        self.delay, self.capacity, self.cached = 0.0, 10_000, 0
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.prompts: list[list[int]] = []
        self.images: list[list[PlacedImage]] = []
        self.params: list[SamplingParams] = []
        self.fail_after: int | None = None
        self.hold: asyncio.Event | None = None
        self._steps, self._last_step = 0, time.monotonic()

    @property
    def progress(self) -> ScriptedProgress:
        return ScriptedProgress(bool(self.running), self._last_step, self._steps, len(self.running))

    async def generate(
        self, request_id: str, prompt: list[int], params: SamplingParams, images: Iterable[PlacedImage] = ()
    ) -> AsyncGenerator[Event, None]:
        if len(self.running) >= self.capacity:
            raise EngineFull("the scripted engine is full", retry_after=2.0)
        self.prompts.append(prompt)
        self.images.append(list(images))
        self.params.append(params)
        self.running.add(request_id)
        done = False
        try:
            if self.hold is not None:
                await self.hold.wait()
            yield Ready(request_id, len(prompt), min(self.cached, len(prompt)))
            tokens = self._constrained(params) if params.grammar else self.script(prompt, params)
            tokens = tokens[: params.max_tokens]
            for index, token in enumerate(tokens):
                await asyncio.sleep(self.delay)
                if index == self.fail_after:
                    yield Finished(request_id, "error", error="scripted failure")
                    return
                self._steps, self._last_step = self._steps + 1, time.monotonic()
                logprob = None if params.logprobs is None else -0.5
                others = tuple((other, -1.0) for other in range(3, 3 + (params.logprobs or 0)))
                yield TokenOutput(request_id, token, "", logprob, others)
            reason: FinishReason = "length" if len(tokens) == params.max_tokens else "stop"
            done = True
            yield Finished(request_id, reason, prompt_tokens=len(prompt), completion_tokens=len(tokens))
        finally:
            self.running.discard(request_id)
            if not done:
                self.aborted.add(request_id)

    def _constrained(self, params: SamplingParams) -> list[int]:
        """A text that the grammar allows: the shortest token most of the time, so that it comes to an end."""
        assert params.grammar is not None
        matcher, rng = self.grammars.compile(params.grammar), random.Random(params.seed or 0)
        row = np.zeros(-(-self.tokenizer.vocab_size // 32), np.int32)
        tokens: list[int] = []
        close = self.tokenizer.special_id(params.grammar.after or "")
        while not matcher.stopped and len(tokens) < params.max_tokens:
            matcher.fill_mask(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: self.tokenizer.vocab_size]
            allowed = [int(i) for i in np.flatnonzero(bits) if i not in self.tokenizer.eos_ids]
            ends = [i for i in allowed if i == close or self.tokenizer.token_bytes(i)[-1:] in b'"}]</>']
            tokens.append(rng.choice(ends or allowed))
            matcher.consume(tokens[-1])
            if matcher.accepting and close in (None, *tokens[:-1]):
                break
        return tokens
