"""Constrained output: which tokens may come next so that the text obeys a schema, an expression or a grammar.

The work is done by llguidance. This module compiles a `GrammarSpec` once, keeps it, and hands every request a
matcher of its own. JSON is compact: white space between its parts is not allowed, since a weak model may otherwise
fill its whole budget with it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from orchestrator.engine.request import GrammarSpec
from orchestrator.engine.schema_check import check_finite
from orchestrator.text.tokenizer import Tokenizer

#: Longest grammar text taken; a larger one is refused rather than compiled for seconds.
MAX_TEXT = 256 * 1024
_COMPACT: Any = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}


class Matcher:
    """State of one request. Not thread-safe; `GrammarCompiler.compile` makes one for each request.

    With a preamble (see `GrammarSpec.after`) any text is allowed up to the token that opens the constrained part:
    no end of text, no other special token, and not the spelling of that token in ordinary ones.
    """

    def __init__(self, body: LLMatcher, preamble: LLMatcher | None = None) -> None:
        self._body, self._preamble = body, preamble
        self._lead = 0  # tokens taken by the preamble
        self._taken = 0  # tokens taken by the body

    @property
    def _inside(self) -> bool:
        before = self._preamble
        return before is None or (before.is_stopped() and not before.is_error())

    @property
    def _current(self) -> LLMatcher:
        return self._body if self._inside else self._preamble  # type: ignore[return-value]

    def fill_mask(self, row: Any) -> None:
        """Write which tokens may come next.

        Args:
            row: int32[ceil(vocab / 32)], a contiguous CPU tensor or array; bit i of word w is token 32 w + i.

        Raises ValueError for another layout, RuntimeError if the grammar engine gave up (`error` says why).
        """
        pointer, size = _memory(row)
        self._current.unsafe_compute_mask_ptr(pointer, size)
        if self.error:
            raise RuntimeError(f"grammar: {self.error}")

    def consume(self, token_id: int) -> None:
        """Take one sampled token. Raises ValueError, with the state unchanged, if it is not allowed here."""
        if not self.advance(token_id):
            raise ValueError(f"token_id: got {token_id}, which the grammar does not allow here")

    def allowed(self, tokens: list[int]) -> int:
        """How many of `tokens`, in order, could be consumed from here. The state does not change."""
        count = 0
        while count < len(tokens) and self.advance(tokens[count]):
            count += 1
        self.rollback(count)
        return count

    def advance(self, token_id: int) -> bool:
        """Take one token if it is allowed here; False leaves the state as it was."""
        inside = self._inside
        if self._current.try_consume_tokens([token_id]) != 1:
            return False
        if inside:
            self._taken += 1
        else:
            self._lead += 1
        return True

    def rollback(self, count: int) -> None:
        """Undo the last `count` consumed tokens. Raises ValueError if there were fewer."""
        if not 0 <= count <= self._taken + self._lead:
            raise ValueError(f"count: got {count}, allowed is 0 to {self._taken + self._lead}")
        body = min(count, self._taken)
        if body:
            self._body.rollback(body)
        if self._preamble is not None and count > body:
            self._preamble.rollback(count - body)
        self._taken -= body
        self._lead -= count - body

    @property
    def taken(self) -> int:
        """Tokens consumed and not undone."""
        return self._taken + self._lead

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return self._inside and self._body.is_accepting()

    @property
    def stopped(self) -> bool:
        """Whether nothing but the end of text may follow."""
        return self._inside and self._body.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the grammar engine gave up (too complex a state, for instance), or None."""
        current = self._current
        return _first_line(current.get_error()) if current.is_error() else None


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe; keeps the `cache_size` grammars used last."""

    def __init__(self, tokenizer: Tokenizer, *, cache_size: int = 64) -> None:
        self._tokenizer = tokenizer
        vocabulary: Any = _Vocabulary(tokenizer)
        self._vocabulary = LLTokenizer(vocabulary, n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_ids))
        self._cache: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Matcher:
        """A fresh matcher for `spec`.

        May take up to seconds for a large grammar (without the interpreter lock): call it off the event loop.
        Raises ValueError for a grammar that is malformed, unsatisfiable, unsupported or too large.
        """
        body = self._template(spec.kind, spec.text).deep_copy()
        if spec.after is None:
            return Matcher(body)
        opener = self._tokenizer.special_id(spec.after)
        if opener is None:
            raise ValueError(f"grammar.after: got {spec.after!r}, allowed is a special token of the vocabulary")
        return Matcher(body, self._template("lark", _preamble(spec.after, opener)).deep_copy())

    def _template(self, kind: str, text: str) -> LLMatcher:
        key = (kind, text)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        matcher = self._build(kind, text)
        with self._lock:
            self._cache[key] = matcher
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return matcher

    def _build(self, kind: str, text: str) -> LLMatcher:
        if len(text) > MAX_TEXT:
            raise ValueError(f"grammar: got {len(text)} characters, allowed is at most {MAX_TEXT}")
        matcher = LLMatcher(self._vocabulary, _source(kind, text), log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar ({kind}): {_summary(matcher.get_error())}")
        probe = matcher.deep_copy()
        if not any(probe.compute_bitmask()) or (probe.is_stopped() and not probe.is_accepting()):
            raise ValueError(f"grammar ({kind}): no text satisfies it")
        return matcher


class _Vocabulary:
    """What llguidance asks of a tokenizer. Added tokens count as special, so that text never contains them."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = list(tokenizer.added_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _source(kind: str, text: str) -> str:
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(parse_schema(text)), overrides=_COMPACT)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    raise ValueError(f"grammar.kind: got {kind!r}, allowed is json_schema, regex or lark")


def parse_schema(text: str) -> dict[str, Any]:
    """A JSON schema from text; empty text stands for any JSON object.

    Raises ValueError if it is none, or one that no finite text satisfies.
    """
    try:
        schema = json.loads(text) if text.strip() else {"type": "object"}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"grammar (json_schema): not JSON ({error})") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"grammar (json_schema): got a {type(schema).__name__}, allowed is an object")
    check_finite(schema)
    return schema


def anything_but(spelling: str, ending: str = "") -> str:
    """Lark expression for text, possibly empty, that does not contain `spelling` and ends with `ending`."""
    return f"/(.|\\n)*{_escape(ending)}/ & ~/(.|\\n)*{_escape(spelling)}(.|\\n)*/"


def _preamble(spelling: str, token_id: int) -> str:
    return f"start: TEXT <[{token_id}]>\nTEXT: {anything_but(spelling)}\n"


def _escape(literal: str) -> str:
    return "".join(char if char.isalnum() or char in "<> ｜" else f"\\{char}" for char in literal)


def _memory(row: Any) -> tuple[int, int]:
    if isinstance(row, np.ndarray):
        if row.dtype != np.int32 or not row.flags.c_contiguous:
            raise ValueError(f"row: got {row.dtype}, allowed is a contiguous int32 array")
        return row.ctypes.data, row.nbytes
    if str(row.dtype) != "torch.int32" or not row.is_contiguous() or row.device.type != "cpu":
        raise ValueError(f"row: got {row.dtype} on {row.device}, allowed is a contiguous int32 CPU tensor")
    return row.data_ptr(), row.numel() * 4


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0]


def _summary(message: str) -> str:
    """The telling line of a library message: the last that starts with "error:", else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return f"{lines[0]} {errors[-1]}" if errors else (lines[0] if lines else "invalid")
