"""Calls of the clients that people use, to any server at a URL: what they got, as plain values.

What an SDK's stream and its whole answer have to agree on is checked here; what the answer should be, by the caller.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pydantic

MODEL = "v41-mini"
USER = [{"role": "user", "content": "Hi"}]
ASKING = [{"role": "user", "content": "What is the weather in Paris today?"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
TOOLS = [{"name": "weather", "input_schema": WEATHER}]


class Point(pydantic.BaseModel):
    x: int
    label: bool


def open_ai(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any-key", max_retries=0, **options)


def claude(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="any-key", max_retries=0, **options)


def chat(url: str, **options: Any) -> dict[str, Any]:
    """One answer at once and one as a stream, which have to be the same."""
    client = open_ai(url)
    answer = client.chat.completions.create(model=MODEL, messages=USER, **options)
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert client.models.list().data[0].id == MODEL
    return {"text": text, "finish": answer.choices[0].finish_reason, "tokens": answer.usage.completion_tokens,
            "cached": answer.usage.prompt_tokens_details.cached_tokens}  # fmt: skip


def responses(url: str, **options: Any) -> dict[str, Any]:
    client = open_ai(url)
    whole = client.responses.create(model=MODEL, input="Hi", **options).output_text
    with client.responses.stream(model=MODEL, input="Hi", **options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == whole
    return {"text": whole}


def messages(url: str, **options: Any) -> dict[str, Any]:
    client = claude(url)
    message = client.messages.create(model=MODEL, max_tokens=50, messages=USER, **options)
    with client.messages.stream(model=MODEL, max_tokens=50, messages=USER, **options) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    return {"text": message.content[0].text, "tokens": message.usage.output_tokens, "prompt": counted,
            "cached": message.usage.cache_read_input_tokens}  # fmt: skip


def chat_tool_call(url: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The message with the call, and its arguments."""
    made = open_ai(url).chat.completions.create(
        model=MODEL, messages=ASKING, tools=CHAT_TOOLS, max_tokens=200, **options
    )
    message = made.choices[0].message
    return message, json.loads(message.tool_calls[0].function.arguments)


def chat_tool_answer(url: str, message: Any, **options: Any) -> str:
    """What is said to the call's result."""
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    history = [*ASKING, message.model_dump(exclude_none=True), result]
    answer = open_ai(url).chat.completions.create(
        model=MODEL, messages=history, tools=CHAT_TOOLS, max_tokens=200, **options
    )
    return answer.choices[0].message.content or ""


def messages_tool_call(url: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    with claude(url).messages.stream(model=MODEL, max_tokens=500, tools=TOOLS, messages=ASKING, **options) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    return message, message.content[-1].input


def messages_tool_answer(url: str, message: Any, **options: Any) -> str:
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "rain"}
    history = [
        *ASKING,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    made = claude(url).messages.create(model=MODEL, max_tokens=500, tools=TOOLS, messages=history, **options)
    return "".join(block.text for block in made.content if block.type == "text")


def structured(url: str, **options: Any) -> list[dict[str, Any]]:
    """Answers that obey a schema, as the SDK's own types, by both protocols of OpenAI."""
    client = open_ai(url)
    parsed = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Point, seed=3, **options)
    other = client.responses.parse(model=MODEL, input="Hi", text_format=Point, **options)
    points = [parsed.choices[0].message.parsed, other.output_parsed]
    assert all(isinstance(point, Point) for point in points)
    return [point.model_dump() for point in points]


def refusals(url: str) -> list[str]:
    """Words of what both SDKs raise for requests that cannot be honoured."""
    said = []
    for call, kind in (
        (lambda: open_ai(url).chat.completions.create(model=MODEL, messages=USER, logit_bias={"5": 1}),
         openai.BadRequestError),
        (lambda: claude(url).messages.create(model="claude-x", max_tokens=5, messages=USER),
         anthropic.BadRequestError),
    ):  # fmt: skip
        try:
            call()
        except kind as error:
            said.append(str(error))
    return said
