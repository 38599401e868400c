"""Cached prompt tokens as clients see them, from the engine's prefix cache through all three protocols."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from orchestrator.engine.async_engine import AsyncEngine
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano
from orchestrator.server import ServerSettings, create_app
from orchestrator.text.tokenizer import load_tokenizer

TEXT = "Say it again, and then once more. " * 20


KEYS = ("first-key-of-two", "second-key-of-two")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The engine behind an event loop, its tokenizer and grammars."""
    folder = make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)
    tokenizer = load_tokenizer(folder)
    engine = Engine(load_model(folder), tokenizer, EngineConfig(num_blocks=64, prefix_cache="exact"))
    running = AsyncEngine(engine)
    yield running, tokenizer, engine.grammars
    running.close()


def client_of(made, **options):
    running, tokenizer, grammars = made
    settings = ServerSettings(model_name="nano", max_context=2048, thinking=False, **options)
    return TestClient(create_app(running, tokenizer, settings, grammars=grammars), base_url="http://127.0.0.1")


@pytest.fixture
def client(made):
    return client_of(made)


def usage_of(client, path, body, stream):
    """The last usage that an answer, or a stream, reports."""
    answer = client.post(path, json={"model": "nano", "temperature": 0, **body, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["usage"]
    found = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for place in (event, event.get("response") or {}, event.get("message") or {}):
                found |= place.get("usage") or {}
    return found


def chat(client, text, stream=False):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "seed": 1}
    extra = {"stream_options": {"include_usage": True}} if stream else {}
    usage = usage_of(client, "/v1/chat/completions", body | extra, stream)
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def responses(client, text, stream=False):
    usage = usage_of(client, "/v1/responses", {"input": text, "max_output_tokens": 16}, stream)
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def messages(client, text, stream=False):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    usage = usage_of(client, "/v1/messages", body, stream)
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached, cached  # here input tokens leave the cached ones out


@pytest.mark.parametrize("protocol", [chat, responses, messages])
def test_a_repeated_prompt_reports_what_was_cached(client, protocol):
    text = f"{protocol.__name__}: {TEXT}"
    tokens, cold = protocol(client, text)
    assert cold == 0 and tokens > 300
    for stream in (False, True):
        again, hot = protocol(client, text, stream)
        assert again == tokens
        assert hot >= 256 and hot % 128 == 0 and hot < tokens
    assert "fathom_cached_tokens_total" in client.get("/metrics").text
    assert protocol(client, "Something else. " + text)[1] == 0


def test_keys_do_not_see_each_others_prompts(made):
    client, cached = client_of(made, api_keys=KEYS), []
    for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[1]):
        client.headers["x-api-key"] = key
        cached.append(chat(client, "Keys: " + TEXT)[1])
    assert cached[:2] == [0, 0] and min(cached[2:]) >= 256
