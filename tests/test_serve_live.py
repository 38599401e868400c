"""`fathom serve` as its users meet it: a process of its own, the vendors' SDKs, a real (small, random) model."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time

import anthropic
import httpx
import jsonschema
import openai
import pytest

pytestmark = pytest.mark.slow
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
}


@pytest.fixture(scope="module")
def url(nano_path):
    command = [sys.executable, "-m", "orchestrator.cli", "serve", "--model", str(nano_path), "--name", "nano"]
    options = ["--port", "0", "--num-blocks", "256", "--log-level", "warning"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            found = re.search(r"on (http://\S+)", line)
            if found:
                break
        else:
            pytest.fail("the server ended before it served")
        address = found.group(1)
        for _ in range(200):
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        assert process.wait(timeout=30) in (0, -15), "the server did not end cleanly"


@pytest.fixture(scope="module")
def chat(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def messages(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def engine_of(url: str) -> dict:
    return httpx.get(f"{url}/health").json()["engine"]


def test_chat_whole_and_streamed_agree(chat):
    whole = chat.chat.completions.create(model="nano", messages=ask("Hello"), max_tokens=24, seed=3)
    assert whole.usage.completion_tokens <= 24 and whole.usage.prompt_tokens > 0
    assert whole.choices[0].finish_reason in ("length", "stop")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(chat.chat.completions.create(model="nano", messages=ask("Hello"), max_tokens=24, seed=3, **options))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_responses_and_messages(chat, messages):
    answer = chat.responses.create(model="nano", input="Hello", max_output_tokens=16)
    assert answer.status in ("completed", "incomplete") and answer.usage.output_tokens <= 16
    kinds = [event.type for event in chat.responses.create(model="nano", input="Hi", max_output_tokens=8, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")

    reply = messages.messages.create(model="nano", messages=ask("Hello"), max_tokens=16)
    assert reply.usage.output_tokens <= 16 and reply.stop_reason in ("max_tokens", "end_turn")
    with messages.messages.stream(model="nano", messages=ask("Hello"), max_tokens=16) as stream:
        events = list(stream)
    assert events[0].type == "message_start" and events[0].message.usage.input_tokens > 0
    assert events[-1].type == "message_stop"


def test_tool_call_round_trip(chat):
    tools = [{"type": "function", "function": {"name": "forecast", "description": "weather", "parameters": TOOL}}]
    first = chat.chat.completions.create(
        model="nano", messages=ask("Oslo?"), tools=tools, tool_choice="required", max_tokens=400, seed=1
    )
    assert first.choices[0].finish_reason == "tool_calls"
    call = first.choices[0].message.tool_calls[0]
    assert call.function.name == "forecast"
    jsonschema.validate(json.loads(call.function.arguments), TOOL)
    history = [
        *ask("Oslo?"),
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    second = chat.chat.completions.create(model="nano", messages=history, tools=tools, max_tokens=8)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def random_schema(draw: random.Random, depth: int = 0) -> dict:
    """A schema with bounded answers: a random model has to come to an end."""
    kinds = ["integer", "boolean", "enum", "string", "null"] + ["object", "array"] * (depth < 2)
    kind = "object" if depth == 0 else draw.choice(kinds)
    if kind == "object":
        names = [f"k{i}" for i in range(draw.randint(1, 4))]
        required = [n for n in names if draw.random() < 0.7]
        properties = {n: random_schema(draw, depth + 1) for n in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = draw.randint(0, 2)
        items = random_schema(draw, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 2)}
    if kind == "integer":
        low = draw.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(0, 8)}
    if kind == "enum":
        return {"enum": draw.sample(["red", "green", "blue", 1, 2.5, True, None], 3)}
    return {"type": kind}


def test_fifty_random_schemas_validate(url):
    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)

        async def one(seed: int) -> None:
            schema = random_schema(random.Random(seed))
            answer = await client.chat.completions.create(
                model="nano",
                messages=ask("Answer in JSON."),
                max_tokens=1500,
                seed=seed,
                response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "stop", (schema, choice)
            jsonschema.validate(json.loads(choice.message.content), schema)

        await asyncio.gather(*(one(seed) for seed in range(50)))

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(url, stream):
    body = {"model": "nano", "messages": ask("Go on"), "max_tokens": 3500, "stream": stream, "temperature": 1.0}
    with httpx.Client(timeout=httpx.Timeout(5, read=1.0)) as client:
        try:
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                next(response.iter_raw())
        except httpx.ReadTimeout:
            assert not stream
    deadline = time.monotonic() + 20
    while engine_of(url)["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    state = engine_of(url)
    assert state["running"] == state["waiting"] == 0
    before = engine_of(url)["steps"]
    time.sleep(0.3)
    assert engine_of(url)["steps"] - before <= 2, "the engine works for nobody"


def test_two_hundred_at_once(url):
    async def run() -> list:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        requests = (
            client.chat.completions.create(model="nano", messages=ask(f"Number {i}"), max_tokens=12, seed=i)
            for i in range(200)
        )
        return await asyncio.gather(*requests)

    answers = asyncio.run(run())
    assert len(answers) == len({a.id for a in answers}) == 200
    assert all(a.choices[0].finish_reason in ("length", "stop") for a in answers)
    state = engine_of(url)
    assert state["running"] == state["waiting"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", b"{"),
        ("chat/completions", b"[]"),
        ("chat/completions", json.dumps({"model": "nano"}).encode()),
        ("chat/completions", json.dumps({"model": "other", "messages": ask("x")}).encode()),
        ("chat/completions", json.dumps({"model": "nano", "messages": ask("x"), "max_tokens": -1}).encode()),
        ("chat/completions", json.dumps({"model": "nano", "messages": ask("x " * 60_000)}).encode()),
        ("chat/completions", b'{"model": "nano", "messages": "' + b"x" * (9 << 20) + b'"}'),
        ("responses", json.dumps({"model": "nano", "input": 3}).encode()),
        ("messages", json.dumps({"model": "nano", "max_tokens": 9, "messages": []}).encode()),
        ("messages", b"\xff\xfe"),
    ],
)
def test_bad_bodies_get_a_helpful_refusal(url, path, body):
    response = httpx.post(f"{url}/v1/{path}", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert 400 <= response.status_code < 500, response.text
    assert len(response.json()["error"]["message"]) > 10
