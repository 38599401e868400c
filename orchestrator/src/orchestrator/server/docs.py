"""What the OpenAPI page says. The recipe checks bodies; these schemas tell readers and test tools the main fields."""

from __future__ import annotations

from importlib import metadata
from typing import Any

DESCRIPTION = "DeepSeek-V4.1 models behind OpenAI's Chat Completions and Responses and Anthropic's Messages."
_TEXT = {"type": "string"}
_LIMIT = {"type": "integer", "minimum": 1}
_SHARED = {
    "model": {"type": "string", "description": "A name from /v1/models"},
    "stream": {"type": "boolean", "description": "Send server-sent events"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "tools": {"type": "array", "items": {"type": "object"}},
    "seed": {"type": "integer", "minimum": 0},
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]}


def _turns(*roles: str) -> dict[str, Any]:
    turn = {"type": "object", "properties": {"role": {"enum": list(roles)}, "content": _CONTENT}, "required": ["role"]}
    return {"type": "array", "minItems": 1, "items": turn}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**_SHARED, **properties}, "required": ["model", *required]}


CHAT = _object(
    ["messages"],
    messages=_turns("system", "user", "assistant", "tool"),
    max_tokens=_LIMIT,
    max_completion_tokens=_LIMIT,
    stop={"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}]},
    response_format={
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema", "regex"]}},
    },
    reasoning_effort={"enum": ["none", "low", "high", "max"]},
    thinking={"type": "object", "properties": {"type": {"enum": ["enabled", "disabled"]}}},
    tool_choice={},
    logprobs={"type": "boolean"},
    top_logprobs={"type": "integer", "minimum": 0, "maximum": 20},
    stream_options={"type": "object"},
)
RESPONSES = _object(
    ["input"],
    input={"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
    instructions=_TEXT,
    max_output_tokens=_LIMIT,
    reasoning={"type": "object", "properties": {"effort": {"enum": ["none", "low", "high", "max"]}}},
    text={"type": "object"},
    tool_choice={},
)
MESSAGES = _object(
    ["messages", "max_tokens"],
    messages=_turns("user", "assistant"),
    max_tokens=_LIMIT,
    system=_CONTENT,
    stop_sequences={"type": "array", "items": _TEXT},
    thinking={"type": "object", "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}}},
    output_config={"type": "object"},
    tool_choice={"type": "object"},
)
COUNT = {**MESSAGES, "required": ["model", "messages"]}
_ERRORS = {
    400: "The request cannot be served as it asks",
    401: "Wrong or missing API key",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when",
    500: "The engine failed",
    503: "The engine does not answer; Retry-After says when",
}


def route(schema: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a route that takes `schema` as its raw JSON body."""
    content = {"application/json": {"schema": schema}}
    answer = {"application/json": {"schema": {"type": "object"}}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {code: {"description": text, "content": answer} for code, text in _ERRORS.items()},
    }


def version() -> str:
    """Version of the installed package."""
    try:
        return metadata.version("orchestrator")
    except metadata.PackageNotFoundError:
        return "0"
