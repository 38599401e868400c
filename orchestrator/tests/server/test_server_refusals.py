"""What is refused, with which status and in whose words."""

import pytest

USER = [{"role": "user", "content": "Hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]

REFUSED_CHAT = {
    "several answers": {"n": 2},
    "token bias": {"logit_bias": {"5": 1}},
    "penalty": {"presence_penalty": 0.5},
    "old functions": {"functions": []},
    "unknown field": {"temprature": 1},
    "stored": {"store": True},
    "audio": {"modalities": ["text", "audio"]},
    "image": {"messages": IMAGE},
    "other model": {"model": "gpt-4"},
    "two limits": {"max_tokens": 3, "max_completion_tokens": 4},
    "limit of zero": {"max_completion_tokens": 0},
    "limit of the wrong type": {"max_completion_tokens": "3"},
    "beyond the context": {"max_tokens": 5000},
    "long prompt": {"messages": [{"role": "user", "content": "word " * 5000}]},
    "expression": {"response_format": {"type": "regex", "regex": "(("}},
    "bounds": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "integer", "minimum": 5, "maximum": 1}},
        }
    },
    "negative seed": {"seed": -1},
    "types": {"messages": "Hi"},
    "forced call while reasoning": {
        "thinking": {"type": "enabled"},
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
}


@pytest.mark.parametrize("name", REFUSED_CHAT)
def test_chat(rig, name):
    response = rig.chat(**REFUSED_CHAT[name])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert not rig.engine.prompts and rig.in_flight == 0


REFUSED_RESPONSES = {
    "earlier answer": {"previous_response_id": "resp_1"},
    "background": {"background": True},
    "conversation": {"conversation": "c"},
    "stored": {"store": True},
    "truncation": {"truncation": "auto"},
    "prompt template": {"prompt": {"id": "p"}},
    "include": {"include": ["file_search_call.results"]},
    "tool limit": {"max_tool_calls": 3},
    "seed": {"seed": "x"},
}


@pytest.mark.parametrize("name", REFUSED_RESPONSES)
def test_responses(rig, name):
    response = rig.responses(**REFUSED_RESPONSES[name])
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert not rig.engine.prompts


REFUSED_MESSAGES = {
    "container": {"container": "c"},
    "servers": {"mcp_servers": [{"url": "http://x"}]},
    "format": {"output_config": {"format": {"type": "xml"}}},
    "schema": {"output_format": {"type": "json_schema", "schema": {"enum": []}}},
    "no messages": {"messages": []},
    "types": {"max_tokens": "many"},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}],
            }
        ]
    },
}


@pytest.mark.parametrize("name", REFUSED_MESSAGES)
def test_messages_errors_have_their_own_shape(rig, name):
    response = rig.messages(**REFUSED_MESSAGES[name])
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    assert not rig.engine.prompts


ACCEPTED = [
    {"logit_bias": {}, "presence_penalty": 0, "store": False, "n": 1, "user": "me", "metadata": {"a": "b"}},
    {"service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": False, "tools": None, "functions": None},
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_defaults_and_harmless_fields_pass(rig, fields):
    assert rig.chat(**fields).status_code == 200


def test_recipe_errors_come_verbatim(rig):
    assert rig.chat(n=2).json() == {
        "error": {
            "message": "Invalid n value (currently only n = 1 is supported)",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_request_error",
        }
    }


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"[" * 50_000, b'{"a": NaN}', b"\xff\xfe", b'{"model": 1e999}']
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_bodies_that_are_no_request(rig, path, body):
    response = rig.client.post(path, content=body)
    assert response.status_code == 400
    assert ("type" in response.json()) == path.startswith("/v1/messages")


def test_large_bodies(make_rig):
    rig = make_rig(max_body_bytes=1000)
    assert rig.chat(messages=[{"role": "user", "content": "x" * 2000}]).status_code == 413

    def chunks():
        for _ in range(100):
            yield b"x" * 100

    response = rig.client.post("/v1/messages", content=chunks())
    assert response.status_code == 413 and response.json()["error"]["type"] == "request_too_large"


def test_keys(make_rig):
    rig = make_rig(api_keys=("first-secret", "second-secret"))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": "Basic first-secret"}):
        for path in ("/v1/chat/completions", "/v1/messages"):
            response = rig.client.post(path, json={}, headers=headers)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
        assert rig.client.get("/v1/models", headers=headers).status_code == 401
        assert rig.client.get("/metrics", headers=headers).status_code == 401
    for headers in ({"authorization": "Bearer first-secret"}, {"x-api-key": "second-secret"}):
        assert rig.client.get("/v1/models", headers=headers).status_code == 200
    assert rig.client.get("/health").status_code == 200
    assert "secret" not in repr(rig.settings)


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}])
def test_without_keys_web_pages_are_kept_out(rig, headers):
    assert rig.client.post("/v1/chat/completions", json={}, headers=headers).status_code == 403
    assert rig.client.get("/v1/models", headers={"host": "localhost:8000"}).status_code == 200


def test_unknown_paths_and_methods(rig):
    assert rig.client.get("/v1/messages").json()["type"] == "error"
    assert rig.client.get("/nothing").json()["error"]["type"] == "not_found_error"
