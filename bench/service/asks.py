"""Requests from a seed: protocols, prompt lengths, shared beginnings, schemas, tools, images."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
KINDS = ("greedy", "sampled", "long", "shared", "schema", "tool", "image", "stop")
_TEXT = (
    "a river under the bridge carries boats past old mills while children count stones and the miller reads letters "
    "about rain wheat prices songs winter roads horses lamps and every function returns a list of names sorted by "
    "length before it prints them to a file that nobody opens until the class has closed its account"
)
_WORDS = tuple(_TEXT.split())
_WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass(frozen=True)
class Ask:
    """One request. `name` tells it from others of its set; the same body gives the same tokens whoever answers it."""

    name: str
    kind: str
    protocol: str
    body: dict[str, Any] = field(hash=False)

    @property
    def path(self) -> str:
        return PATHS[self.protocol]


def make(
    seed: int, count: int, *, model: str, kinds: Sequence[str] = KINDS, tokens: int = 96, long: int = 6000
) -> list[Ask]:
    """`count` requests; kinds and protocols take turns.

    `tokens`: most that an answer has; `long`: words of a long prompt.
    """
    return [
        one(seed, number, model=model, kind=kinds[number % len(kinds)], tokens=tokens, long=long)
        for number in range(count)
    ]


def one(
    seed: int, number: int, *, model: str, kind: str, tokens: int = 96, long: int = 6000, protocol: str | None = None
) -> Ask:
    """The request of this number; ValueError for a kind that there is none of."""
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(KINDS)}")
    rng = random.Random(f"{seed}/{number}")
    protocol = protocol or tuple(PATHS)[(number // len(KINDS) + number % len(KINDS)) % len(PATHS)]
    text = _prompt(seed, kind, rng, long)
    body: dict[str, Any] = {"model": model, "stream": True, **_turns(protocol, kind, text, rng)}
    body["max_output_tokens" if protocol == "responses" else "max_tokens"] = tokens
    if kind == "greedy":
        body["temperature"] = 0.0
    else:
        body |= {
            "temperature": rng.choice((0.7, 1.0, 1.3)),
            "top_p": rng.choice((1.0, 0.95)),
            "seed": rng.randrange(2**31),
        }
    if protocol == "chat":
        body |= {"logprobs": True, "top_logprobs": rng.choice((0, 2)), "stream_options": {"include_usage": True}}
        if kind in ("sampled", "long", "shared"):
            body["ignore_eos"] = True  # streams of a known length, for faults to meet
    if protocol == "responses":
        body["include"] = ["message.output_text.logprobs"]
    body |= _extras(protocol, kind, rng)
    return Ask(f"{number}-{kind}-{protocol}", kind, protocol, body)


def _prompt(seed: int, kind: str, rng: random.Random, long: int) -> str:
    if kind == "long":
        return _words(rng, rng.randrange(long // 2, long + 1))
    if kind == "shared":  # one of three long beginnings, and an end of its own
        return _words(random.Random(f"{seed}/{rng.randrange(3)}/shared"), long // 2) + " " + _words(rng, 20)
    if kind == "schema":
        return "Give me some numbers, please: " + _words(rng, rng.randrange(3, 40))
    if kind == "tool":
        return f"What is the weather in {rng.choice(('Paris', 'Oslo', 'Lima', 'Cairo'))} today?"
    if kind == "image":
        return "What does the picture show?"
    return "Write a Python module about " + _words(rng, rng.randrange(5, 200))


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def _turns(protocol: str, kind: str, text: str, rng: random.Random) -> dict[str, Any]:
    content: Any = text
    if kind == "image":
        word = "input_text" if protocol == "responses" else "text"
        content = [{"type": word, "text": text}, _picture(protocol, picture(rng.randrange(6)))]
    return {"input" if protocol == "responses" else "messages": [{"role": "user", "content": content}]}


def _picture(protocol: str, coded: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{coded}"
    if protocol == "chat":
        return {"type": "image_url", "image_url": {"url": url}}
    if protocol == "responses":
        return {"type": "input_image", "image_url": url}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": coded}}


@lru_cache(maxsize=64)
def picture(seed: int) -> str:
    """A small PNG of noise, in base64: the same for the same seed, so that encoders meet images again."""
    from PIL import Image

    rng = random.Random(f"{seed}/picture")
    width, height = 40 + 8 * (seed % 5), 32 + 8 * (seed % 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), rng.randbytes(width * height * 3)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _extras(protocol: str, kind: str, rng: random.Random) -> dict[str, Any]:
    if kind == "schema":
        return _schema(protocol, rng)
    if kind == "tool":
        return _tools(protocol)
    if kind == "stop":
        word = rng.choice((" the", "e", "\n"))
        return {} if protocol == "responses" else {"stop_sequences" if protocol == "messages" else "stop": [word]}
    return {}


def _schema(protocol: str, rng: random.Random) -> dict[str, Any]:
    least = rng.randrange(5, 25)
    values = {"type": "array", "items": {"type": "integer"}, "minItems": least, "maxItems": least + 10}
    schema = {"type": "object", "properties": {"values": values}, "required": ["values"], "additionalProperties": False}
    if protocol == "chat":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}}
    if protocol == "responses":
        return {"text": {"format": {"type": "json_schema", "name": "numbers", "schema": schema, "strict": True}}}
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def _tools(protocol: str) -> dict[str, Any]:
    if protocol == "chat":
        tool: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}
        return {"tools": [tool], "tool_choice": "required"}
    if protocol == "responses":
        return {"tools": [{"type": "function", "name": "weather", "parameters": _WEATHER}], "tool_choice": "required"}
    return {"tools": [{"name": "weather", "input_schema": _WEATHER}], "tool_choice": {"type": "any"}}
