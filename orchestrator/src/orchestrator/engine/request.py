"""What goes into the engine and what comes out: sampling parameters, grammars and events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kernel_core.check import require
from orchestrator.cache.retention import Retention

GrammarKind = Literal["json_schema", "regex", "lark"]
FinishReason = Literal["stop", "length", "abort", "error"]
CACHE_CLASSES = tuple(kind.name.lower() for kind in Retention)


class EngineFull(RuntimeError):
    """The waiting queue is at its limit. `retry_after` is a hint in seconds, `status` what HTTP clients are told."""

    status = 429

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
        min_tokens: no end token is sampled and no stop string is looked for before this many tokens; a grammar that
            has come to its end ends the text all the same.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, beside the model's own.
        ignore_eos: go on after the model's end-of-text token. A grammar that has come to its end still ends the text.
        seed: the same seed gives the same tokens, alone or in any batch; None draws one.
        logprobs: number of alternatives to report a token; 0 reports the chosen token only; None reports nothing.
        prompt_logprobs: log-probability of each prompt token; turns the bounded decoder tail off for the request.
        cache_salt: requests of different salts share nothing in the prefix cache; also the tenant whose byte budget
            in the store its blocks count for.
        cache_class: how long the store keeps its blocks: "agent" (3 days) or "chat" (7 days).
        grammar: constraint on the output. A token of `stop_token_ids` is sampled only where the grammar allows it.
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
    cache_salt: str = ""
    cache_class: str = "chat"
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            given = getattr(self, name)
            items = (given,) if isinstance(given, kind) else tuple(given) if isinstance(given, Iterable) else (None,)
            self._check(name, all(type(item) is kind for item in items), f"a sequence of {kind.__name__}")
            object.__setattr__(self, name, items)
        for name in ("temperature", "top_p"):
            self._check(name, _is_number(getattr(self, name)), "a number")
        for name in ("top_k", "max_tokens", "min_tokens"):
            self._check(name, type(getattr(self, name)) is int, "an integer")
        for name in ("seed", "logprobs"):
            self._check(name, getattr(self, name) is None or type(getattr(self, name)) is int, "an integer or None")
        self._check("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "a number above 0, at most 1")
        self._check("top_k", 0 <= self.top_k < 2**31, "0 (off) or a positive integer")
        self._check("max_tokens", self.max_tokens >= 1, "an integer of at least 1")
        self._check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "an integer from 0 to max_tokens")
        self._check("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer or None")
        self._check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "None or an integer from 0 to 20")
        self._check("stop", len(self.stop) <= 16 and all(self.stop), "at most 16 strings, none of them empty")
        self._check("cache_salt", isinstance(self.cache_salt, str), "a string")
        self._check("cache_class", self.cache_class in CACHE_CLASSES, f"one of {', '.join(CACHE_CLASSES)}")
        self._check("grammar", self.grammar is None or isinstance(self.grammar, GrammarSpec), "a GrammarSpec or None")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        require(holds, name, repr(getattr(self, name)), allowed)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Ready:
    """Sent once, before the first token: how long the prompt is and how much of it was cached."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenOutput:
    """One sampled token. `text` is what became printable with it, possibly nothing.

    `logprob` and `top_logprobs` are taken after masks and before temperature; fewer alternatives than asked for come
    back where a grammar leaves fewer tokens.
    """

    request_id: str
    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """Sent once, last. `text` is what was held back, for instance the possible start of a stop string.

    The end token (`stop_token`) has no `TokenOutput` of its own; `completion_tokens` counts it.
    """

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
