"""What comes for one request, as the events that an engine of this process would give."""

from __future__ import annotations

from orchestrator.engine.grammar import Matcher
from orchestrator.engine.request import EngineFull, Event, Finished, FinishReason, Ready, SamplingParams, TokenOutput
from orchestrator.engine.text_stream import TextStream
from orchestrator.roles.handoff_port import decode_note
from orchestrator.roles.messages import Deliver, DeliverEnd, DeliverReady
from orchestrator.service.front.entry_loop import Delivery
from orchestrator.text.tokenizer import Tokenizer


class Answer:
    """Makes the events of one request, in the order in which its deliveries come. For one thread.

    Tokens alone travel; their text is made here by the same rules as in an engine. `matcher` is a fresh one of the
    request's grammar, `eos` the model's end tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        matcher: Matcher | None = None,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id, self.prompt_tokens, self.params = request_id, prompt_tokens, params
        self.cached_tokens = self.output_tokens = 0
        self._ready = False
        self._text = None if tokenizer is None else TextStream(tokenizer, params.stop)
        self._matcher = matcher
        # As in the engine: nothing may follow the end of text in a grammar, whatever `ignore_eos` says.
        model_ends = eos if matcher is not None or not params.ignore_eos else frozenset[int]()
        self._ends = model_ends | set(params.stop_token_ids)

    def take(self, delivery: Delivery) -> list[Event]:
        """Events of a delivery.

        Raises, for a request that ended before it began:
            EngineFull: too much is asked of the service. ValueError: it can never run.
            RuntimeError: the service does not answer.
        """
        if isinstance(delivery, Deliver):
            return self._tokens(delivery)
        if isinstance(delivery, DeliverReady):
            self._ready, self.cached_tokens = True, delivery.cached_tokens
            return [Ready(self.request_id, delivery.prompt_tokens, delivery.cached_tokens)]
        return [self._end(delivery)]

    def aborted(self) -> Finished:
        """The end of a request that was given up here."""
        return self._finished("abort", 0)

    def _tokens(self, delivery: Deliver) -> list[Event]:
        events: list[Event] = []
        notes = delivery.notes or (b"",) * len(delivery.tokens)
        for token, note in zip(delivery.tokens, notes, strict=True):
            self.output_tokens += 1
            text = ""
            if self._text is not None:
                text = self._text.push(token, may_stop=self.output_tokens >= self.params.min_tokens).text
            if self._matcher is not None:
                self._matcher.advance(token)
            if note and self.params.logprobs is not None:
                events.append(TokenOutput(self.request_id, token, text, *decode_note(note)))
            else:
                events.append(TokenOutput(self.request_id, token, text))
        return events

    def _end(self, end: DeliverEnd) -> Finished:
        if end.outcome == "finished":
            return self._finished("length" if end.reason == "length" else "stop", end.tokens)
        if end.outcome == "cancelled":
            return self._finished("abort", end.tokens)
        if end.outcome == "rejected":
            if end.status == 429:
                raise EngineFull(end.reason, float(end.retry_after or 1))
            raise ValueError(end.reason)
        if not self._ready and end.status in (503, 504):
            raise RuntimeError(end.reason)
        return self._finished("error", end.tokens, error=end.reason)

    def _finished(self, reason: FinishReason, tokens: int, error: str | None = None) -> Finished:
        held, stop_sequence = "", None if self._text is None else self._text.stopped
        if self._text is not None and stop_sequence is None:
            held = self._text.finish()
            if reason == "length" and self._text.stopped is not None:
                reason, stop_sequence = "stop", self._text.stopped
        # Neither a stop string nor the grammar's end: it was an end token, which is no output but counts.
        by_grammar = self._matcher is not None and self._matcher.stopped
        ended = reason == "stop" and stop_sequence is None and not by_grammar
        return Finished(
            self.request_id,
            reason,
            text=held,
            stop_sequence=stop_sequence if reason == "stop" else None,
            stop_token=next(iter(self._ends)) if ended and len(self._ends) == 1 else None,
            error=error,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=tokens + ended,
        )
