"""One data-parallel rank: takes requests, runs steps, gives out events."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import count, groupby
from typing import NamedTuple

import torch

from kernel_core.check import require
from orchestrator.engine.checks import check_request
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.fence import Fence, FencedPool
from orchestrator.engine.grammar import GrammarCompiler, Matcher
from orchestrator.engine.graphs import DecodeGraphs
from orchestrator.engine.handoff.given_out import ended_by, repeat_tokens
from orchestrator.engine.image_spans import ImageSpan, PlacedImage
from orchestrator.engine.images import Images
from orchestrator.engine.launch import CudaStream, InOrder, Launcher
from orchestrator.engine.lockstep import Lockstep
from orchestrator.engine.pipeline import Pipeline
from orchestrator.engine.prefix_cache import PrefixCache
from orchestrator.engine.ranges import named
from orchestrator.engine.request import EngineFull, Event, Finished, FinishReason, Ready, SamplingParams, TokenOutput
from orchestrator.engine.rules import Rules
from orchestrator.engine.runner import Runner
from orchestrator.engine.sampler import Sample, Sampler
from orchestrator.engine.scheduler import Scheduler, Step
from orchestrator.engine.sequence import Sequence, State
from orchestrator.engine.shared_blocks import SharedBlocks
from orchestrator.engine.speculator import Batch, Speculator
from orchestrator.engine.stats import EngineStats
from orchestrator.engine.text_stream import TextStream
from orchestrator.engine.undo import Undo
from orchestrator.engine.window_copies import WindowCopies
from orchestrator.model.cache import CachePools
from orchestrator.model.drafter import Drafter
from orchestrator.model.record import Recorder
from orchestrator.model.transformer import Transformer
from orchestrator.model.vision.encoder import VisionEncoder
from orchestrator.text.tokenizer import Tokenizer
from swa_replay import plan_decoder_tail

_LISTEN_S = 0.02  # new requests are not seen while a step waits for fetched blocks


class _Done(NamedTuple):
    """What a step came to: requests with new tokens, rows, seconds of the forward pass, whether all of it decoded."""

    sampled: list[Sequence]
    rows: int
    seconds: float
    decoded: bool


class Engine:
    """Synchronous core. Not thread-safe, but for `check` and `compile`: `AsyncEngine` owns one from a single thread.

    `tokenizer` is needed for text, stop strings and grammars; without it events carry token ids alone.

    Steps run one by one, or decode steps overlap (`pipeline`, on a GPU by default). Requests come and go between steps;
    blocks and slots are free when no step in flight can touch them any more.
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
        depth = self.config.depth(model.config)
        drafter = Drafter(model, mode=self.config.dense) if depth else None
        self.cache = CachePools(
            model.config,
            self.config.num_blocks + 1,
            self.config.max_num_seqs + 1,
            quantised=self.config.quantised_caches,
            draft_stages=model.config.num_nextn_predict_layers if depth else 0,
            device=model.device,
        )
        self.fence = Fence()
        self.prefix: PrefixCache | None = None
        blocks: FencedPool | SharedBlocks = FencedPool(self.config.num_blocks + 1, "cache blocks", self.fence)
        if self.config.prefix_cache != "off":
            marks = (self.config.prefix_high, self.config.prefix_low)
            blocks = SharedBlocks(self.config.num_blocks + 1, "cache blocks", self.fence, marks)
            self.prefix = PrefixCache(self.config.prefix_cache, blocks, self.cache, self.config.window_bytes)
        self.scheduler = Scheduler(
            blocks,
            FencedPool(self.config.max_num_seqs + 1, "request slots", self.fence),
            self.config.max_step_tokens,
            self.config.chunk_tokens,
            self.prefix,
        )
        self.runner = Runner(model, self.cache, None, drafter)
        if self.config.cuda_graphs and model.device.type == "cuda":
            self.runner.graphs = DecodeGraphs(
                model,
                self.cache,
                largest=self.config.max_num_seqs,
                context=self.context,
                forward=self.runner.forward,
            )
        eos = {model.config.eos_token_id, *(() if tokenizer is None else tokenizer.eos_ids)}
        self.sampler = Sampler(vocab, tuple(sorted(eos)), model.device)
        self.speculator: Speculator | None = None
        if drafter is not None:
            fixed = self.config.speculation != "scheduled"
            self.speculator = Speculator(drafter, self.cache, self.sampler, depth, fixed=fixed)
        self.images: Images | None = None
        if model.config.vision is not None:
            encoder = None if model.weights.vision is None else VisionEncoder(model.weights)
            self.images = Images(encoder, self.config.image_bytes, self.config.image_patches)
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer)
        self.stats = EngineStats()
        self.pipeline: Pipeline | None = None
        if self.config.overlap or (self.config.overlap is None and where == "cuda"):
            self.overlap(CudaStream() if where == "cuda" else InOrder())
        self._lockstep: Lockstep | None = None
        self._drafted = False  # the draft stages ran in this step
        self.forwards = 0  # forward passes started, of empty batches too
        self._sequences: dict[str, Sequence] = {}
        self._leavers: set[Sequence] = set()
        self._order = count()
        self._events: list[Event] = []

    def forget_graphs(self, warm_ups: int) -> None:
        """Drop recorded steps, since what they read has moved; later ones are recorded after so many runs."""
        for graphs in (self.runner.graphs, None if self.pipeline is None else self.pipeline.graphs):
            if graphs is not None:
                graphs.forget(warm_ups)

    def overlap(self, launcher: Launcher, rules: Rules | None = None) -> None:
        """Have decode steps overlap, with device work going through `launcher`. Not while one is in flight."""
        self.pipeline = Pipeline(self, launcher, rules)
        self.fence.kept = self.pipeline.rules.fenced_frees
        if self.prefix is not None:
            copies = WindowCopies(self.prefix.rings, launcher)
            self.pipeline.starting = copies.start
            self.pipeline.written = lambda sequence, blocks, tokens: self._overlapped(sequence, copies)

    @property
    def lockstep(self) -> Lockstep | None:
        """The ranks whose steps this engine's go with. Their failures end its steps, so steps can be taken back."""
        return self._lockstep

    @lockstep.setter
    def lockstep(self, lockstep: Lockstep | None) -> None:
        self._lockstep = lockstep
        if lockstep is not None and self.runner.undo is None:
            self.runner.undo = Undo(self.cache)

    @property
    def has_work(self) -> bool:
        in_flight = self.pipeline is not None and self.pipeline.flight is not None
        return bool(self._events) or self.scheduler.has_work or in_flight

    def check(self, prompt: list[int], params: SamplingParams, images: Items[PlacedImage] = ()) -> None:
        """Raise ValueError for what can never run: empty or too long prompt, unknown token, misplaced image.

        Grammars: see `compile`.
        """
        check_request(
            prompt,
            params,
            images,
            model=self.model.config,
            context=self.context,
            has_tokenizer=self.tokenizer is not None,
        )

    def compile(self, params: SamplingParams) -> Matcher | None:
        """A fresh matcher of the request's grammar. May take seconds; any thread may call it.

        Raises ValueError for a grammar that is malformed, unsatisfiable or too large.
        """
        return None if params.grammar is None or self.grammars is None else self.grammars.compile(params.grammar)

    def encode(
        self, images: Items[PlacedImage], params: SamplingParams, stop: threading.Event | None = None
    ) -> tuple[ImageSpan, ...]:
        """What `add` takes as `encoded`; to be given to `release` if it does not get there. Any thread may call it.

        Images that were seen before are not encoded again. Raises ValueError and EngineFull as `Images.encode`.
        """
        if not images:
            return ()
        if self.images is None:
            raise ValueError(f"images: got {len(images)}, allowed is none, since the model has no image encoder")
        return self.images.encode(images, params.cache_salt, stop)

    def release(self, encoded: Items[ImageSpan], params: SamplingParams) -> None:
        """Give back what `encode` gave."""
        if self.images is not None:
            self.images.release(encoded, params.cache_salt)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        matcher: Matcher | None = None,
        recorder: Recorder | None = None,
        generated: tuple[int, ...] = (),
        seed: int | None = None,
        leaves_at: int | None = None,
        images: Items[PlacedImage] = (),
        encoded: tuple[ImageSpan, ...] | None = None,
    ) -> None:
        """Queue a request. `matcher` is what `compile` gave for it, and `encoded` what `encode` did, if called already.

        `generated` tokens were given out elsewhere: they are computed again as one reads a prompt, and what follows
        them is what would have followed there, given the `seed` that was drawn there for a request without one. No
        event tells of them. With `leaves_at` the request is to go elsewhere (`engine.handoff`) once it has so many
        tokens of output; 0 computes the global rows of its prompt alone.

        Raises:
            ValueError: it can never run (see `check`, `compile` and `encode`), or its id is in use.
            EngineFull: too many are waiting, or too many images.
        """
        self.check(prompt, params, images)
        least = 1 if params.prompt_logprobs or generated else 0
        allowed = f"None or an integer of at least {least}" + (" with prompt_logprobs or generated" if least else "")
        require(leaves_at is None or (type(leaves_at) is int and leaves_at >= least), "leaves_at", leaves_at, allowed)
        if request_id in self._sequences:
            raise ValueError(f"request_id: got {request_id!r}, which is running; ids have to be unique")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise EngineFull(f"{self.config.max_waiting} requests are waiting already; try again later")
        sequence = self.begin(request_id, prompt, params, matcher=matcher, recorder=recorder, seed=seed)
        sequence.images = self.encode(images, params) if encoded is None else encoded
        sequence.leaves_at = leaves_at
        try:
            if self.prefix is not None:
                self.prefix.prepare(sequence)
            if params.prompt_logprobs:
                sequence.prompt_logprobs.append(None)  # nothing predicts the first token
            repeat_tokens(sequence, generated)
        except BaseException:
            if encoded is None:
                self.release(sequence.images, params)
            raise
        self.enter(sequence)
        self.scheduler.add(sequence)
        self.end_if_ended(sequence)

    def end_if_ended(self, sequence: Sequence) -> None:
        """End a request whose tokens from elsewhere have ended it: nobody there could say so any more."""
        reason, stop = ended_by(sequence)
        if reason is not None:
            self._finish(sequence, reason, stop_sequence=stop)

    def begin(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        matcher: Matcher | None = None,
        recorder: Recorder | None = None,
        seed: int | None = None,
    ) -> Sequence:
        """A request that nobody knows yet, without output. Raises ValueError for its grammar."""
        if seed is None:
            seed = secrets.randbits(64) if params.seed is None else params.seed
        return Sequence(
            request_id=request_id,
            params=params,
            tokens=list(prompt),
            prompt_len=len(prompt),
            max_total=min(len(prompt) + params.max_tokens, self.context),
            order=next(self._order),
            seed=_signed(seed),
            decoder_lower=self._decoder_lower(len(prompt), params),
            matcher=matcher or self.compile(params),
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
            recorder=recorder,
        )

    def enter(self, sequence: Sequence) -> None:
        """Know a request by its id from now on."""
        self._sequences[sequence.request_id] = sequence
        if sequence.leaves_at is not None:
            self._leavers.add(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """A request that has not ended, by its id."""
        return self._sequences.get(request_id)

    def depart(self, sequence: Sequence) -> None:
        """Forget a leaving request, which goes on elsewhere, and free what it holds. No event tells of it."""
        self._drop(sequence, good=True)  # its full blocks stay for others to find

    def stay(self, sequence: Sequence) -> None:
        """Have a request that was to leave stay. One that has stopped goes on once the scheduler has it back."""
        sequence.leaves_at = None
        self._leavers.discard(sequence)

    def _let_leave(self) -> None:
        """Stop the requests whose time it is to leave."""
        self._leavers = {s for s in self._leavers if s.state is not State.FINISHED}
        for sequence in [s for s in self._leavers if s.state is State.RUNNING and s.leaves]:
            self.scheduler.hold(sequence)
            self._leavers.discard(sequence)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and ended ids are no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.aborted = True
            self._finish(sequence, "abort")

    def take_events(self) -> list[Event]:
        """What happened since the last call; after `abort` between steps, for instance."""
        events, self._events = self._events, []
        return events

    def step(self) -> list[Event]:
        """Run one step and return what happened, each request's events in order.

        In `lockstep` with other ranks it is the step that was agreed on in the call before; there may be none.
        """
        began, before = time.perf_counter(), self.forwards
        if self.lockstep is None or self.lockstep.runs:
            self._drafted = False
            overlapped = self._step()
            if self.lockstep is not None and self.forwards == before:
                self.forwards += 1
                self.runner.idle()
            if self.lockstep is not None and self.speculator is not None and not (overlapped or self._drafted):
                self.speculator.drafter.join()
        if self._leavers:
            self._let_leave()
        if self.lockstep is not None:
            self.lockstep.agree(self.has_work)
        self.stats.step_seconds += time.perf_counter() - began
        self.stats.last_step = time.monotonic()
        return self.take_events()

    def flip(self, change: Callable[[], None]) -> None:
        """Have `change` alter weights or routing before the next step and behind all that were started (rule H12)."""
        if self.pipeline is None:
            change()
        else:
            self.pipeline.flip(change)

    @torch.inference_mode()
    def settle(self) -> None:
        """After a step that ended in an error, and once nothing of it runs any more: go on from the step before it.

        What earlier steps brought is taken, rings that the failed one wrote are put back, its requests run again.
        """
        if self.pipeline is not None:
            self.pipeline.settle()
        if self.runner.undo is not None:
            self.runner.undo.back()
        if self.speculator is not None:  # drafts may have been those of the failed step
            self.speculator.last = Batch()
            for sequence in self._sequences.values():
                sequence.drafts = []

    def _step(self) -> bool:
        """Whether the step overlaps the one before it."""
        if self.prefix is not None and self.prefix.seeks:
            self._take_arrivals(self.prefix)
        if self.pipeline is not None:
            if self.pipeline.turn():
                return True
            self.pipeline.drain()
        with named("step alone"):
            self._step_alone()
        return False

    def _take_arrivals(self, prefix: PrefixCache) -> None:
        """Take in what was fetched; with nothing else to do wait for some, not long, as requests may come."""
        prefix.arrived.clear()
        prefix.arrive(self.scheduler.waiting)
        idle = self.pipeline is None or self.pipeline.flight is None
        if idle and self.scheduler.stuck and prefix.arrived.wait(_LISTEN_S):
            prefix.arrive(self.scheduler.waiting)

    def _step_alone(self) -> None:
        """Plan, compute and take note of one step, with none in flight."""
        if self.speculator is not None:
            self.speculator.plan([s for s in self.scheduler.running if s.remaining == 1])
        step = self.scheduler.schedule()
        if step:
            starts = {sequence: sequence.computed for sequence, _ in step.work}
            began = time.perf_counter()
            done = self._run(step)
            self.stats.steps += 1
            if self.prefix is not None:
                for sequence, tokens in step.work:
                    if sequence.state is State.RUNNING:
                        self.prefix.wrote(sequence, starts[sequence] + tokens)
                self.scheduler.reclaim()
            if self.speculator is not None and done.sampled:  # last: if others' failures end it, the step stands
                self._drafted = self.speculator.propose(done.sampled)
                if done.decoded and self.model.device.type == "cpu":  # elsewhere it has only been started by then
                    other = time.perf_counter() - began - done.seconds
                    self.speculator.budget.note(len(done.sampled), done.rows, done.seconds, other)

    def _overlapped(self, sequence: Sequence, copies: WindowCopies) -> None:
        """Have others find what an overlapped step has written."""
        rows = copies.take(sequence)
        if self.prefix is not None and sequence.state is State.RUNNING:
            behind = self.fence.launched > self.fence.done + 1  # the next step writes already
            self.prefix.wrote_overlapped(sequence, rows, behind=behind)

    def _run(self, step: Step) -> _Done:
        """Compute one step, without new drafts, and take note of all that came out."""
        self.stats.preemptions += len(step.park)
        began = time.perf_counter()
        if self.prefix is not None:
            for sequence, _ in step.work:
                self.prefix.restore(sequence)
        logits, rows = self.runner.run(step)
        self.forwards += bool(step.work)
        forward = time.perf_counter() - began
        self.stats.model_seconds += forward
        starts = {sequence: sequence.computed for sequence, _ in step.work}
        for sequence, tokens in step.work:
            self._advance(sequence, min(tokens, sequence.remaining))
        groups = [(sequence, len(list(same))) for sequence, same in groupby(rows)]
        if any(s.params.prompt_logprobs for s, _ in groups):
            logits, groups = self._take_prompt_rows(logits, groups, starts)
        if not groups:
            return _Done([], 0, forward, False)
        sequences = [sequence for sequence, _ in groups]
        if self.speculator is None:
            sampled = [[sample] for sample in self.sampler.sample(logits, sequences)]
        else:
            sampled = self.speculator.verify(logits, groups)
        for (sequence, fed), samples in zip(groups, sampled, strict=True):
            self.take(sequence, fed - 1, samples)
        decoded = len(groups) == len(step.work) and all(starts[s] >= s.prompt_len for s in sequences)
        return _Done(sequences, logits.shape[0], forward, decoded)

    def take(self, sequence: Sequence, drafts: int, samples: list[Sample]) -> None:
        """Take a request's new tokens until one of them ends it, after `drafts` were verified.

        All tokens but the last have their cache rows.
        """
        self.stats.verifications += 1
        self.stats.drafts += drafts
        self.stats.accepted += max(0, len(samples) - 1)
        for sample in samples:
            sequence.computed = len(sequence.tokens)  # a sample is drawn from the row of the token before it
            self._commit(sequence, sample)
            if sequence.state is State.FINISHED:
                return

    def _advance(self, sequence: Sequence, tokens: int) -> None:
        """Note that the next `tokens` of a request have their cache rows."""
        if not sequence.announced:
            sequence.announced = True
            self.stats.cached_tokens += sequence.hit
            self._events.append(Ready(sequence.request_id, sequence.prompt_len, sequence.hit))
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

    def _take_prompt_rows(
        self, logits: torch.Tensor, groups: list[tuple[Sequence, int]], starts: dict[Sequence, int]
    ) -> tuple[torch.Tensor, list[tuple[Sequence, int]]]:
        """Note prompt log-probabilities; return the rows that are left to be sampled.

        `starts` are the positions of each request's first row.
        """
        keep: list[int] = []
        left, row = [], 0
        for sequence, rows in groups:
            following = starts[sequence] + 1  # a row's logits are those of the next position
            if sequence.params.prompt_logprobs and following <= sequence.prompt_len:
                for position in range(following, min(following + rows, sequence.prompt_len)):
                    logprobs = torch.log_softmax(logits[row + position - following].double(), dim=0)
                    sequence.prompt_logprobs.append(float(logprobs[sequence.tokens[position]]))
                used = [row + rows - 1] if sequence.remaining == 0 else []
            else:
                used = list(range(row, row + rows))
            if used:
                keep += used
                left.append((sequence, len(used)))
            row += rows
        return logits[keep], left

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_sequence: str | None = None,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        self._drop(sequence, good=reason != "error")  # rows that gave no distribution are nobody else's
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
                cached_tokens=sequence.hit,
                completion_tokens=sequence.output_len,
                prompt_logprobs=tuple(sequence.prompt_logprobs),
            )
        )

    def _drop(self, sequence: Sequence, *, good: bool) -> None:
        """Free what a request holds and forget it; `good` says that its rows are right."""
        if self.prefix is not None:
            self.prefix.leave(sequence, good=good)
        self.scheduler.finish(sequence)
        sequence.matcher = None  # a step on its way needs no mask for it any more
        del self._sequences[sequence.request_id]
        self.release(sequence.images, sequence.params)

    def _decoder_lower(self, prompt_len: int, params: SamplingParams) -> int:
        if self.config.decoder_prefill == "exact" or params.prompt_logprobs:
            return 0
        config = self.model.config
        return plan_decoder_tail(prompt_len, config.sliding_window, config.draft_length).start


def _signed(seed: int) -> int:
    """A 64-bit seed as torch's int64."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
