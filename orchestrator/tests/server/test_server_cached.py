"""Cached prompt tokens as clients see them, from the engine's prefix cache through all three protocols."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.retention import DAY, RetentionPolicy
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.engine.async_engine import AsyncEngine
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.prefix_tier import PrefixTier
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano
from orchestrator.server import ServerSettings, create_app
from orchestrator.server.auth import caller_of
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


@pytest.fixture
def kept(made, tmp_path):
    """A store behind the engine's pool, with a budget for the first key; the engine has none before and afterwards."""
    engine = made[0].engine
    layout = BlockLayout.of(engine.model.config)
    policy = RetentionPolicy(budgets={caller_of(KEYS[0]): 3 * (layout.block_bytes + 4096)})
    store = EmbeddedStore(tmp_path / "store", layout.tag, 1 << 24, policy)
    arena = HostArena.create(tmp_path / "arena", layout.tag, 64, layout.block_bytes)
    engine.prefix.tier = PrefixTier(CacheClient.inline(store, arena, engine.prefix.scope))
    yield store
    engine.prefix.tier = None
    store.close()


def ask(client, key, text, kind=None):
    """Cached tokens of one chat."""
    headers = {"x-api-key": key} | ({"x-cache-class": kind} if kind else {})
    body = {"model": "nano", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def stays(entries):
    """Days that entries stay from their last use on, to the minute."""
    return {round((entry.expiry - entry.atime) / DAY, 2) for entry in entries}


def test_class_and_tenant_of_a_request_reach_the_store(made, kept):
    client, chains = client_of(made, api_keys=KEYS), []
    for i, (key, kind, days) in enumerate([(KEYS[0], "agent", 3), (KEYS[1], "CHAT", 7), (KEYS[1], None, 7)]):
        before = set(kept.index)
        assert ask(client, key, f"Class {i}: " + TEXT, kind) == 0
        chains.append(list(set(kept.index) - before))
        assert len(chains[-1]) >= 2 and stays(chains[-1]) == {days}
        assert {entry.tenant for entry in chains[-1]} == {caller_of(key)}
    assert ask(client, KEYS[0], "Class 0: " + TEXT, "chat") >= 256
    assert stays(chains[0]) == {3, 7}  # the path that a chat used stays as long as chats do
    assert ask(client, KEYS[1], "Class 1: " + TEXT, "agent") >= 256
    assert stays(chains[1]) == {7}  # an agent's use shortens nothing


def test_tenants_share_nothing_in_the_store_and_keep_to_their_bytes(made, kept):
    client, index = client_of(made, api_keys=KEYS), kept.index
    assert [ask(client, key, "Tenants: " + TEXT * 2) for key in KEYS] == [0, 0]
    names = [caller_of(key) for key in KEYS]
    held = [{entry.key for entry in index if entry.tenant == name} for name in names]
    assert len(held[0]) == len(held[1]) >= 4 and not held[0] & held[1]
    kept.collect(max(entry.atime for entry in index))
    budget = index.policy.budgets[names[0]]
    assert budget // 2 < index.used_by[names[0]] <= budget
    assert {entry.key for entry in index if entry.tenant == names[1]} == held[1]


@pytest.mark.parametrize("given", ["days", "", "agent,chat"])
def test_a_class_that_there_is_not(client, given):
    answer = client.post("/v1/messages", json={"model": "nano"}, headers={"x-cache-class": given})
    assert answer.status_code == 400 and "x-cache-class: got" in answer.text and "agent, chat" in answer.text
