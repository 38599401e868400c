"""One data-parallel rank: takes requests, runs steps, gives out events."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from itertools import count

import torch

from kernel_core.check import require
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.grammar import GrammarCompiler, Matcher
from orchestrator.engine.graphs import DecodeGraphs
from orchestrator.engine.pool import IdPool
from orchestrator.engine.request import EngineFull, Event, Finished, FinishReason, Ready, SamplingParams, TokenOutput
from orchestrator.engine.runner import Runner
from orchestrator.engine.sampler import Sample, Sampler
from orchestrator.engine.scheduler import Scheduler
from orchestrator.engine.sequence import Sequence
from orchestrator.engine.text_stream import TextStream
from orchestrator.model.cache import CachePools
from orchestrator.model.record import Recorder
from orchestrator.model.transformer import Transformer
from orchestrator.text.tokenizer import Tokenizer
from swa_replay import plan_decoder_tail


@dataclass
class EngineStats:
    """Counters since the start; times in seconds. On a GPU `model_seconds` is what starting the work takes."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    last_step: float = field(default_factory=time.monotonic)


class Engine:
    """Synchronous core. Not thread-safe, but for `check` and `compile`: `AsyncEngine` owns one from a single thread.

    `tokenizer` is needed for text, stop strings and grammars; without it events carry token ids alone.

    A step has ended on the device before the next is planned (a GPU runs them in order), and requests come and go
    between steps only. So blocks and slots are free the moment they are given back: no step in flight can still read
    them before the one that writes them anew.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None = None, config: EngineConfig | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self.model, self.tokenizer = model, tokenizer
        vocab = model.config.vocab_size
        if tokenizer is not None:
            require(tokenizer.vocab_size == vocab, "tokenizer", f"{tokenizer.vocab_size} ids", f"{vocab}, as the model")
        where = model.device.type
        require(self.config.device == where, "device", repr(self.config.device), f"{where!r}, where the model is")
        self.context = self.config.context(model.config)
        self.cache = CachePools(
            model.config,
            self.config.num_blocks + 1,
            self.config.max_num_seqs + 1,
            quantised=self.config.quantised_caches,
            device=model.device,
        )
        self.scheduler = Scheduler(
            IdPool(self.config.num_blocks + 1, "cache blocks"),
            IdPool(self.config.max_num_seqs + 1, "request slots"),
            self.config.max_step_tokens,
            self.config.chunk_tokens,
        )
        graphs = None
        if self.config.cuda_graphs and model.device.type == "cuda":
            graphs = DecodeGraphs(model, self.cache, largest=self.config.max_num_seqs, context=self.context)
        self.runner = Runner(model, self.cache, graphs)
        eos = {model.config.eos_token_id, *(() if tokenizer is None else tokenizer.eos_ids)}
        self.sampler = Sampler(vocab, tuple(sorted(eos)), model.device)
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer)
        self.stats = EngineStats()
        self._sequences: dict[str, Sequence] = {}
        self._order = count()
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        return bool(self._events) or self.scheduler.has_work

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise ValueError for what can never run: empty or too long prompt, unknown token. Grammars: see `compile`."""
        vocab = self.model.config.vocab_size
        known = f"an integer from 0 to {vocab - 1}"
        require(isinstance(params, SamplingParams), "params", repr(params), "SamplingParams")
        require(len(prompt) > 0, "prompt", "no tokens", "at least one")
        for token in prompt:
            if not (isinstance(token, int) and 0 <= token < vocab):
                raise ValueError(f"prompt: got token {token!r}, allowed is {known}")
        if len(prompt) >= self.context:
            raise ValueError(
                f"prompt: got {len(prompt)} tokens, allowed is at most {self.context - 1} (context {self.context} "
                "less one token to sample); raise max_model_len or num_blocks, or shorten the prompt"
            )
        if self.tokenizer is None:
            for name in ("stop", "grammar"):
                given = getattr(params, name)
                require(not given, name, repr(given), "nothing, since the engine has no tokenizer")
        for token in params.stop_token_ids:
            require(0 <= token < vocab, "stop_token_ids", token, known)

    def compile(self, params: SamplingParams) -> Matcher | None:
        """A fresh matcher of the request's grammar. May take seconds; any thread may call it.

        Raises ValueError for a grammar that is malformed, unsatisfiable or too large.
        """
        return None if params.grammar is None or self.grammars is None else self.grammars.compile(params.grammar)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        matcher: Matcher | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Queue a request. `matcher` is what `compile` gave for it, if it was called already.

        Raises:
            ValueError: it can never run (see `check` and `compile`), or its id is in use.
            EngineFull: too many are waiting.
        """
        self.check(prompt, params)
        if request_id in self._sequences:
            raise ValueError(f"request_id: got {request_id!r}, which is running; ids have to be unique")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise EngineFull(f"{self.config.max_waiting} requests are waiting already; try again later")
        sequence = Sequence(
            request_id=request_id,
            params=params,
            tokens=list(prompt),
            prompt_len=len(prompt),
            max_total=min(len(prompt) + params.max_tokens, self.context),
            order=next(self._order),
            seed=_signed(secrets.randbits(64) if params.seed is None else params.seed),
            decoder_lower=self._decoder_lower(len(prompt), params),
            matcher=matcher or self.compile(params),
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

    def take_events(self) -> list[Event]:
        """What happened since the last call; after `abort` between steps, for instance."""
        events, self._events = self._events, []
        return events

    def step(self) -> list[Event]:
        """Run one step and return what happened, each request's events in order."""
        began = time.perf_counter()
        step = self.scheduler.schedule()
        if step:
            self.stats.preemptions += len(step.park)
            model_began = time.perf_counter()
            logits, rows = self.runner.run(step)
            self.stats.model_seconds += time.perf_counter() - model_began
            for sequence, tokens in step.work:
                self._advance(sequence, tokens)
            if any(s.params.prompt_logprobs for s in rows):
                logits, rows = self._take_prompt_rows(logits, rows)
            if rows:
                for sequence, sample in zip(rows, self.sampler.sample(logits, rows), strict=True):
                    self._commit(sequence, sample)
            self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - began
        self.stats.last_step = time.monotonic()
        return self.take_events()

    def _advance(self, sequence: Sequence, tokens: int) -> None:
        """Note that the next `tokens` of a request have their cache rows."""
        if not sequence.announced:
            sequence.announced = True
            self._events.append(Ready(sequence.request_id, sequence.prompt_len))
        self.stats.prompt_tokens += max(0, min(tokens, sequence.prompt_len - sequence.computed))
        sequence.computed += tokens

    def _commit(self, sequence: Sequence, sample: Sample) -> None:
        if sample.error is not None:
            self._finish(sequence, "error", error=sample.error)
            return
        params, token = sequence.params, sample.token
        sequence.tokens.append(token)
        self.stats.output_tokens += 1
        # Nothing may follow the end of text in a grammar, so there `ignore_eos` cannot be honoured.
        eos = token in self.sampler.eos and (sequence.matcher is not None or not params.ignore_eos)
        if eos or token in params.stop_token_ids:
            self._finish(sequence, "stop", stop_token=token)
            return
        text, stopped = "", None
        if sequence.text is not None:
            delta = sequence.text.push(token, may_stop=sequence.output_len >= params.min_tokens)
            text, stopped = delta.text, delta.stopped
        logprob = None if params.logprobs is None else sample.logprob
        self._events.append(TokenOutput(sequence.request_id, token, text, logprob, sample.alternatives))
        if stopped is not None:
            self._finish(sequence, "stop", stop_sequence=stopped)
        elif sequence.matcher is not None and self._ends_grammar(sequence, token):
            pass
        elif len(sequence.tokens) >= sequence.max_total:
            self._finish(sequence, "length")

    def _ends_grammar(self, sequence: Sequence, token: int) -> bool:
        """Tell the grammar of a token; True if that ended the request."""
        try:
            sequence.matcher.consume(token)
        except ValueError as error:
            self._finish(sequence, "error", error=f"the grammar refused a token that it had allowed: {error}")
            return True
        if sequence.matcher.stopped:
            self._finish(sequence, "stop")
            return True
        return False

    def _take_prompt_rows(self, logits: torch.Tensor, rows: list[Sequence]) -> tuple[torch.Tensor, list[Sequence]]:
        """Note prompt log-probabilities; return the rows that are left to be sampled.

        A request's rows stand together and end at its last computed token.
        """
        keep, row = [], 0
        while row < len(rows):
            sequence, first = rows[row], row
            while row < len(rows) and rows[row] is sequence:
                row += 1
            if sequence.params.prompt_logprobs:
                start = sequence.computed - (row - first) + 1  # a row's logits are those of the next position
                for position in range(start, min(start + row - first, sequence.prompt_len)):
                    logprobs = torch.log_softmax(logits[first + position - start].double(), dim=0)
                    sequence.prompt_logprobs.append(float(logprobs[sequence.tokens[position]]))
            if sequence.remaining == 0:
                keep.append(row - 1)
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
        held = ""
        if sequence.text is not None and stop_sequence is None:
            held = sequence.text.finish()
            if reason == "length" and sequence.text.stopped is not None:  # completed by what stood for a broken byte
                reason, stop_sequence = "stop", sequence.text.stopped
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

    def _decoder_lower(self, prompt_len: int, params: SamplingParams) -> int:
        if self.config.decoder_prefill == "exact" or params.prompt_logprobs:
            return 0
        config = self.model.config
        return plan_decoder_tail(prompt_len, config.sliding_window, config.draft_length).start


def _signed(seed: int) -> int:
    """A 64-bit seed as torch's int64."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
