"""Request fields that deepseek-recipe does not act upon: each is honoured here, without effect by nature, or refused.

The recipe reads the fields it knows and drops the rest without a word. A client that sends ``logit_bias`` should
not get an answer that ignored it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

READ = {
    "chat": "frequency_penalty logprobs max_tokens messages model n parallel_tool_calls presence_penalty "
    "reasoning_effort response_format seed stop stream stream_options temperature thinking tool_choice tools "
    "top_logprobs top_p",
    "responses": "input instructions max_output_tokens model reasoning stream temperature text tool_choice tools "
    "top_logprobs top_p user",
    "messages": "max_tokens messages metadata model output_config stop_sequences stream system temperature thinking "
    "tool_choice tools top_p",
}
HONOURED = {
    "chat": "max_completion_tokens top_k min_tokens ignore_eos stop_token_ids",
    "responses": "seed parallel_tool_calls include top_k",
    "messages": "top_k seed output_format",
}
#: Fields that tell the server something it has no use for: dropping them changes no answer.
WITHOUT_EFFECT = {
    "chat": "metadata user safety_identifier prompt_cache_key prompt_cache_retention prediction verbosity",
    "responses": "metadata safety_identifier prompt_cache_key prompt_cache_retention stream_options",
    "messages": "cache_control betas inference_geo",
}
#: Values of otherwise unsupported fields that ask for what happens anyway.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "service_tier": ("auto", "default", "standard", "standard_only"),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "mcp_servers": ([],),
    "context_management": ({}, []),
    "speed": ("standard",),
    "best_of": (1,),
    "echo": (False,),
    "repetition_penalty": (1,),
    "min_p": (0,),
}
_HINTS = {
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "guided_json": "use 'response_format'",
    "guided_regex": "use 'response_format' with type 'regex'",
    "previous_response_id": "responses are not stored; send the whole conversation in 'input'",
    "conversation": "responses are not stored; send the whole conversation in 'input'",
    "background": "only answers in the foreground are possible",
    "store": "responses are not stored",
}
_REFUSED_THOUGH_READ = ("frequency_penalty", "presence_penalty")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDE = ("reasoning.encrypted_content", _LOGPROBS)


class Extras(BaseModel):
    """The honoured fields, checked. Those of other protocols stay at their defaults."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    max_completion_tokens: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None


def check_fields(protocol: str, body: Mapping[str, Any]) -> Extras:
    """Raises ValueError naming the first field that cannot be honoured or has a wrong value."""
    taken = {name for table in (READ, HONOURED, WITHOUT_EFFECT) for name in table[protocol].split()}
    taken.difference_update(_REFUSED_THOUGH_READ)
    for name, value in body.items():
        if name in taken or value is None or any(_same(value, default) for default in DEFAULTS.get(name, ())):
            continue
        hint = _HINTS.get(name)
        raise ValueError(f"Unsupported field '{name[:80]}'{f': {hint}' if hint else ''}")
    try:
        names = {*HONOURED[protocol].split(), "seed", "parallel_tool_calls"}
        extras = Extras.model_validate({name: value for name, value in body.items() if name in names})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"Invalid value for '{where}': {first['msg']}") from None
    for name in extras.include or ():
        if name not in _INCLUDE:
            raise ValueError(f"Unsupported value in 'include': {name[:80]!r}; allowed are {', '.join(_INCLUDE)}")
    return extras


def in_recipe_words(body: dict[str, Any], extras: Extras) -> dict[str, Any] | None:
    """The body with fields that the recipe knows by another name under that name, or None if nothing changes."""
    if extras.include and _LOGPROBS in extras.include and body.get("top_logprobs") is None:
        return {**body, "top_logprobs": 0}
    if extras.max_completion_tokens is None:
        return None
    given = body.get("max_tokens")
    if given is not None and given != extras.max_completion_tokens:
        raise ValueError("'max_tokens' and 'max_completion_tokens' differ; give one of them")
    return {**body, "max_tokens": extras.max_completion_tokens}


def _same(value: Any, default: Any) -> bool:
    """Equality that tells False from 0."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)
