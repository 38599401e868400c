"""The three protocols: which recipe types convert, stream and collect, and what each leaves for the server to do."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe


@dataclass(frozen=True)
class Api:
    """One protocol. `name` is its label in metrics; the rest are recipe types."""

    name: str
    prefix: str
    request: Any
    response: Any

    def new_id(self) -> str:
        return self.prefix + secrets.token_hex(12)

    def generator(
        self, converted: recipe.ConversationRequest, request_id: str, model: str, extra: ResponseExtra
    ) -> Any:
        """The recipe's source of protocol events, for one request."""
        made = self.request.chunk_generator(converted, request_id, model)
        if extra.echo is not None:
            made = made.with_echo(extra.echo)
        if extra.namespaces:
            made = made.with_namespace_tool_map(extra.namespaces)
        return made

    def collector(self, request_id: str, model: str, prompt_tokens: int, cached_tokens: int) -> Any:
        """The recipe's accumulator of a whole answer."""
        return self.response(request_id, model, int(time.time()), prompt_tokens, cached_tokens)


@dataclass(frozen=True)
class ResponseExtra:
    """What only the Responses protocol reports back, read before conversion consumes the request."""

    echo: recipe.ResponsesEcho | None = None
    namespaces: dict[str, tuple[str, str]] | None = None


CHAT = Api("chat", "chatcmpl-", recipe.ChatCompletionRequest, recipe.ChatCompletionResponse)
RESPONSES = Api("responses", "resp_", recipe.ResponsesRequest, recipe.ResponsesResponse)
MESSAGES = Api("messages", "msg_", recipe.MessagesRequest, recipe.MessagesResponse)


def forced_call(api: Api, body: dict[str, Any]) -> bool:
    """Whether a Messages request wants some tool called (`any`), which the recipe weakens to `auto`."""
    choice = body.get("tool_choice")
    return api is MESSAGES and isinstance(choice, dict) and choice.get("type") == "any"


def parallel_calls(api: Api, body: dict[str, Any]) -> bool:
    """Whether one answer may hold several calls."""
    if api is not MESSAGES:
        return body.get("parallel_tool_calls") is not False
    choice = body.get("tool_choice")
    return not (isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True)


def messages_schema(api: Api, body: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that a Messages request wants its answer to obey; the recipe drops it.

    Raises ValueError for a format other than ``json_schema``.
    """
    if api is not MESSAGES:
        return None
    config = body.get("output_config")
    nested = config.get("format") if isinstance(config, dict) else None
    chosen = nested if nested is not None else body.get("output_format")
    if chosen is None:
        return None
    schema = chosen.get("schema") if isinstance(chosen, dict) and chosen.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise ValueError("Invalid output format: allowed is {'type': 'json_schema', 'schema': {...}}")
    return schema
