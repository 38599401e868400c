"""What a client got: collected from the events of the three protocols, and compared with what it should have got."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Answer:
    """Times are seconds of `time.monotonic`.

    Attributes:
        parts: text by its place in the answer (`text`, `reasoning`, `call 0 weather`, ...). tokens: text and
            log-probabilities of each token, where the protocol tells them. finish: reason of the end, as told.
        times: of each event that carried output. trouble: what went wrong on the wire; "" for an answer that ended.
        left: the client went away by itself. refusals: times that it was told to come back.
    """

    parts: dict[str, str] = field(default_factory=dict)
    tokens: list[Any] = field(default_factory=list)
    finish: str = ""
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    began: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    status: int = 0
    trouble: str = ""
    left: bool = False
    refusals: int = 0

    @property
    def first(self) -> float | None:
        """Seconds to the first output."""
        return self.times[0] - self.began if self.times else None

    @property
    def longest_gap(self) -> float:
        """Seconds between two events that carried output; 0 where there were not two."""
        return max((b - a for a, b in pairwise(self.times)), default=0.0)

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first."""
        if self.completion < 2 or len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion - 1)

    def take(self, protocol: str, event: dict[str, Any], now: float) -> bool:
        """One event; True at the last one."""
        done, carried = _READ[protocol](self, event)
        if carried:
            self.times.append(now)
        return done

    def add(self, part: str, text: str) -> bool:
        self.parts[part] = self.parts.get(part, "") + text
        return bool(text)


def difference(expected: Answer, got: Answer) -> str:
    """What a client would complain about; "" if nothing. "lost": a tail is missing; "changed": anything else."""
    if got.left:
        return _left(expected, got)
    if got.trouble:
        return f"failed: {got.trouble}"
    for part in expected.parts.keys() | got.parts.keys():
        want, have = expected.parts.get(part, ""), got.parts.get(part, "")
        if want != have:
            return f"{'lost' if want.startswith(have) else 'changed'}: {part} {_around(want, have)}"
    if got.tokens != expected.tokens:
        at = next((i for i, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=False)) if a != b), -1)
        if at < 0:
            return f"changed: {len(got.tokens)} tokens with log-probabilities, expected are {len(expected.tokens)}"
        return f"changed: token {at} {got.tokens[at]}, expected is {expected.tokens[at]}"
    for name in ("finish", "prompt", "completion"):
        if getattr(got, name) != getattr(expected, name):
            return f"changed: {name} {getattr(got, name)!r}, expected is {getattr(expected, name)!r}"
    return ""


def _left(expected: Answer, got: Answer) -> str:
    for part, have in got.parts.items():
        want = expected.parts.get(part, "")
        if not want.startswith(have):
            return f"changed: {part} {_around(want, have)}"
    return ""


def _around(want: str, have: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
    place = slice(max(0, at - 20), at + 20)
    return f"at character {at} of {len(want)}: {have[place]!r}, expected is {want[place]!r}"


def _chat(answer: Answer, event: dict[str, Any]) -> tuple[bool, bool]:
    if event.get("error"):
        answer.trouble = json.dumps(event["error"])[:300]
        return True, False
    carried = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        carried |= answer.add("text", delta["content"]) if delta.get("content") else False
        carried |= answer.add("reasoning", delta["reasoning_content"]) if delta.get("reasoning_content") else False
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            carried |= answer.add(f"call {call.get('index', 0)} name", function.get("name") or "")
            carried |= answer.add(f"call {call.get('index', 0)}", function.get("arguments") or "")
        answer.tokens += (choice.get("logprobs") or {}).get("content") or []
        answer.finish = choice.get("finish_reason") or answer.finish
    usage = event.get("usage")
    if usage:
        answer.prompt, answer.completion = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return False, carried  # [DONE] is the last one


def _responses(answer: Answer, event: dict[str, Any]) -> tuple[bool, bool]:
    kind, place = event.get("type", ""), event.get("output_index", 0)
    if kind == "response.output_text.delta":
        answer.tokens += event.get("logprobs") or []
        return False, answer.add(f"text {place}", event["delta"])
    if kind in ("response.function_call_arguments.delta", "response.reasoning_text.delta"):
        return False, answer.add(f"{kind.split('.')[1]} {place}", event["delta"])
    if kind == "response.output_text.done" and event["text"] != answer.parts.get(f"text {place}", ""):
        answer.trouble = "the whole text is not what its deltas were"
    if kind in ("error", "response.failed"):
        answer.trouble = json.dumps(event)[:300]
        return True, False
    if kind in ("response.completed", "response.incomplete"):
        response = event["response"]
        details = response.get("incomplete_details") or {}
        answer.finish = details.get("reason") or response["status"]
        usage = response["usage"]
        answer.prompt, answer.completion = usage["input_tokens"], usage["output_tokens"]
        answer.cached = usage["input_tokens_details"]["cached_tokens"]
        return True, False
    return False, False


def _messages(answer: Answer, event: dict[str, Any]) -> tuple[bool, bool]:
    kind, place = event.get("type", ""), event.get("index", 0)
    if kind == "content_block_start" and event["content_block"].get("type") == "tool_use":
        return False, answer.add(f"call {place} name", event["content_block"]["name"])
    if kind == "content_block_delta":
        delta = event["delta"]
        for name in ("text", "partial_json", "thinking"):
            if name in delta:
                return False, answer.add(f"{name} {place}", delta[name])
    if kind in ("message_start", "message_delta"):
        usage = (event.get("message") or event).get("usage") or {}
        answer.prompt = usage.get("input_tokens", answer.prompt) + usage.get("cache_read_input_tokens", 0)
        answer.cached = usage.get("cache_read_input_tokens", answer.cached)
        answer.completion = usage.get("output_tokens", answer.completion)
        answer.finish = (event.get("delta") or {}).get("stop_reason") or answer.finish
    if kind == "error":
        answer.trouble = json.dumps(event.get("error"))[:300]
        return True, False
    return kind == "message_stop", False


_READ = {"chat": _chat, "responses": _responses, "messages": _messages}
