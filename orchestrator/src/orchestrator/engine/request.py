"""What goes into the engine and what comes out: sampling parameters, grammars and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_schema", "regex", "lark"]
FinishReason = Literal["stop", "length", "abort", "error"]


class EngineFull(RuntimeError):
    """The waiting queue is at its limit. `retry_after` is a hint in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class GrammarSpec:
    """A constraint on the output: a JSON schema, a regular expression or a Lark grammar, as text.

    `after` names a special token (for instance ``</think>``); the constraint starts once it was sampled.
    """

    kind: GrammarKind
    text: str
    after: str | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    Attributes:
        temperature: 0 (or below 1e-5) takes the most likely token.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        max_tokens: at most this many tokens; it is cut to what the context allows.
        min_tokens: no end of text before this many tokens.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, beside the model's own.
        ignore_eos: go on after the model's end-of-text token.
        seed: the same seed gives the same tokens, alone or in any batch; None draws one.
        logprobs: number of alternatives to report a token; 0 reports the chosen token only; None reports nothing.
        prompt_logprobs: log-probability of each prompt token; turns the bounded decoder tail off for the request.
        grammar: constraint on the output.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "a number above 0, at most 1")
        self._check("top_k", 0 <= self.top_k < 2**31, "0 (off) or a positive integer")
        self._check("max_tokens", self.max_tokens >= 1, "an integer of at least 1")
        self._check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "an integer from 0 to max_tokens")
        self._check("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer or None")
        self._check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "None or an integer from 0 to 20")
        self._check("stop", len(self.stop) <= 16 and all(self.stop), "at most 16 strings, none of them empty")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{name}: got {getattr(self, name)!r}, allowed is {allowed}")


@dataclass(frozen=True)
class Ready:
    """Sent once, before the first token: how long the prompt is and how much of it was cached."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenOutput:
    """One sampled token. `text` is what became printable with it, possibly nothing."""

    request_id: str
    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """Sent once, last. `text` is what was held back, for instance the possible start of a stop string."""

    request_id: str
    reason: FinishReason
    text: str = ""
    stop_sequence: str | None = None
    stop_token: int | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: tuple[float | None, ...] = field(default=(), repr=False)


Event = Ready | TokenOutput | Finished
