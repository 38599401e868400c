"""One data-parallel rank: takes requests, runs steps, gives out events."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from itertools import count

import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.engine.pool import IdPool
from orchestrator.engine.request import EngineFull, Event, Finished, FinishReason, Ready, SamplingParams, TokenOutput
from orchestrator.engine.runner import Runner
from orchestrator.engine.sampler import Sampler
from orchestrator.engine.scheduler import Scheduler
from orchestrator.engine.sequence import Sequence
from orchestrator.engine.text_stream import TextStream
from orchestrator.model.cache import CachePools
from orchestrator.model.record import Recorder
from orchestrator.model.transformer import Transformer


@dataclass
class EngineStats:
    """Counters since the start; times in seconds."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    last_step: float = field(default_factory=time.monotonic)


class Engine:
    """Synchronous core. Not thread-safe: `AsyncEngine` owns one from a single thread.

    `tokenizer` is needed for text, stop strings and grammars; without it events carry token ids alone.
    """

    def __init__(self, model: Transformer, tokenizer: object | None = None, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.model, self.tokenizer = model, tokenizer
        self.context = self.config.context(model.config)
        self.cache = CachePools(
            model.config,
            self.config.num_blocks + 1,
            self.config.max_num_seqs + 1,
            quantised=self.config.quantised_caches,
        )
        self.scheduler = Scheduler(
            IdPool(self.config.num_blocks + 1, "cache blocks"),
            IdPool(self.config.max_num_seqs + 1, "request slots"),
            self.config.max_step_tokens,
            self.config.chunk_tokens,
        )
        self.runner = Runner(model, self.cache)
        self.sampler = Sampler(model.config.vocab_size, (model.config.eos_token_id,))
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer)
        self.stats = EngineStats()
        self._sequences: dict[str, Sequence] = {}
        self._order = count()
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        return bool(self._events) or self.scheduler.has_work

    def add(
        self, request_id: str, prompt: list[int], params: SamplingParams, *, recorder: Recorder | None = None
    ) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run (empty or too long prompt, unknown token, bad grammar, id in use).
            EngineFull: too many are waiting.
        """
        self._check(request_id, prompt, params)
        sequence = Sequence(
            request_id=request_id,
            params=params,
            tokens=list(prompt),
            prompt_len=len(prompt),
            max_total=min(len(prompt) + params.max_tokens, self.context),
            order=next(self._order),
            seed=_signed(secrets.randbits(64) if params.seed is None else params.seed),
            decoder_lower=self._decoder_lower(len(prompt), params),
            matcher=self._matcher(params),
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
            recorder=recorder,
        )
        if params.prompt_logprobs:
            sequence.prompt_logprobs.append(None)  # nothing predicts the first token
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and ended ids are no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    def step(self) -> list[Event]:
        """Run one step and return what happened, each request's events in order."""
        began = time.perf_counter()
        step = self.scheduler.schedule()
        if step:
            starting = [s for s, _ in step.work if s.computed == 0 and s.preemptions == 0]
            self._events += [Ready(s.request_id, s.prompt_len) for s in starting]
            self.stats.preemptions += len(step.park)
            model_began = time.perf_counter()
            logits, rows = self.runner.run(step)
            self.stats.model_seconds += time.perf_counter() - model_began
            for sequence, tokens in step.work:
                self.stats.prompt_tokens += max(
                    0, min(sequence.computed + tokens, sequence.prompt_len) - sequence.computed
                )
                sequence.computed += tokens
            self._sample(*self._prompt_logprobs(logits, rows))
            self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - began
        self.stats.last_step = time.monotonic()
        events, self._events = self._events, []
        return events

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        tokens, logprobs, alternatives = self.sampler.sample(logits, sequences)
        for sequence, token, logprob, others in zip(sequences, tokens, logprobs, alternatives, strict=True):
            if token < 0:
                self._finish(sequence, "error", error="the model gave no usable distribution for the next token")
            else:
                self._commit(sequence, token, logprob, others)

    def _commit(self, sequence: Sequence, token: int, logprob: float, others: list[tuple[int, float]]) -> None:
        params = sequence.params
        sequence.tokens.append(token)
        self.stats.output_tokens += 1
        eos = token in self.sampler.eos and not params.ignore_eos
        if eos or token in params.stop_token_ids:
            self._finish(sequence, "stop", stop_token=token)
            return
        text, stopped = "", None
        if sequence.text is not None:
            delta = sequence.text.push(token)
            text, stopped = delta.text, delta.stopped
        wants = params.logprobs is not None
        self._events.append(TokenOutput(sequence.request_id, token, text, logprob if wants else None, tuple(others)))
        if stopped is not None:
            self._finish(sequence, "stop", stop_sequence=stopped)
        elif sequence.matcher is not None and not self._advance(sequence, token):
            pass
        elif len(sequence.tokens) >= sequence.max_total:
            self._finish(sequence, "length")

    def _advance(self, sequence: Sequence, token: int) -> bool:
        """Tell the grammar of a token; False if that ended the request."""
        try:
            sequence.matcher.consume(token)
        except ValueError as error:
            self._finish(sequence, "error", error=f"the grammar refused a token that it had allowed: {error}")
            return False
        if sequence.matcher.stopped:
            self._finish(sequence, "stop")
            return False
        return True

    def _prompt_logprobs(self, logits: torch.Tensor, rows: list[Sequence]) -> tuple[torch.Tensor, list[Sequence]]:
        """Take the rows that belong to prompts out of `logits`; what is left is to be sampled."""
        last = {id(s): i for i, s in enumerate(rows)}
        if len(last) == len(rows) and all(s.remaining == 0 for s in rows):
            return logits, rows
        keep = []
        for sequence_id, end in last.items():
            sequence = rows[end]
            first = next(i for i, s in enumerate(rows) if id(s) == sequence_id)
            start = sequence.computed - (end - first + 1)
            for i in range(first, end + 1):
                target = start + (i - first) + 1
                if sequence.params.prompt_logprobs and target < sequence.prompt_len:
                    row = torch.log_softmax(logits[i].double(), dim=0)
                    sequence.prompt_logprobs.append(float(row[sequence.tokens[target]]))
            if sequence.remaining == 0:
                keep.append(end)
        return logits[keep], [rows[i] for i in keep]

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_sequence: str | None = None,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        self.scheduler.finish(sequence)
        del self._sequences[sequence.request_id]
        held = sequence.text.finish() if sequence.text is not None and stop_sequence is None else ""
        self._events.append(
            Finished(
                sequence.request_id,
                reason,
                text=held,
                stop_sequence=stop_sequence,
                stop_token=stop_token,
                error=error,
                prompt_tokens=sequence.prompt_len,
                completion_tokens=sequence.output_len,
                prompt_logprobs=tuple(sequence.prompt_logprobs),
            )
        )

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        vocab = self.model.config.vocab_size
        if request_id in self._sequences:
            raise ValueError(f"request_id: got {request_id!r}, which is running; ids have to be unique")
        if not prompt:
            raise ValueError("prompt: got no tokens, allowed is at least one")
        if not all(0 <= t < vocab for t in prompt):
            bad = next(t for t in prompt if not 0 <= t < vocab)
            raise ValueError(f"prompt: got token {bad}, allowed is 0 to {vocab - 1}")
        if len(prompt) >= self.context:
            raise ValueError(
                f"prompt: got {len(prompt)} tokens, allowed is at most {self.context - 1} (context {self.context} "
                "less one token to sample); raise max_model_len or num_blocks, or shorten the prompt"
            )
        if self.tokenizer is None and (params.stop or params.grammar):
            raise ValueError("stop, grammar: the engine has no tokenizer, so neither can be honoured")
        bad_stops = [t for t in params.stop_token_ids if not 0 <= t < vocab]
        if bad_stops:
            raise ValueError(f"stop_token_ids: got {bad_stops[0]}, allowed is 0 to {vocab - 1}")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise EngineFull(f"{self.config.max_waiting} requests are waiting already; try again later")

    def _decoder_lower(self, prompt_len: int, params: SamplingParams) -> int:
        if self.config.decoder_prefill == "exact" or params.prompt_logprobs:
            return 0
        return max(0, prompt_len - self.model.config.keep_tokens)

    def _matcher(self, params: SamplingParams) -> object | None:
        return None if params.grammar is None or self.grammars is None else self.grammars.compile(params.grammar)


def _signed(seed: int) -> int:
    """A 64-bit seed as torch's int64."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
