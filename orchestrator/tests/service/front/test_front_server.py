"""The HTTP application over a service."""

import asyncio
import json

import httpx
import pytest
from service_kit_front import until, wait_until

from orchestrator.server import ServerSettings, create_app

MODEL = "v41-mini"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 50},
}


@pytest.fixture
def make_app(make_rig, tokenizer):
    def make(*args, **options):
        rig = make_rig(*args, **options)
        settings = ServerSettings(model_name=MODEL, max_context=rig.engine.context, thinking=False)
        return rig, create_app(rig.engine, tokenizer, settings, grammars=rig.engine.grammars)

    return make


def post(app, path, **fields):
    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            return await client.post(path, json={**BODIES[path], **fields})

    return asyncio.run(ask())


def test_three_protocols(make_app):
    rig, app = make_app("Hello, wörld 🎉")
    chat = post(app, "/v1/chat/completions")
    assert chat.status_code == 200, chat.text
    chat = chat.json()
    assert chat["choices"][0]["message"]["content"] == "Hello, wörld 🎉"
    assert (
        chat["choices"][0]["finish_reason"] == "stop" and chat["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    )
    assert post(app, "/v1/messages").json()["content"] == [{"type": "text", "text": "Hello, wörld 🎉"}]
    assert post(app, "/v1/responses").json()["output"][0]["content"][0]["text"] == "Hello, wörld 🎉"
    assert rig.engine.idle


@pytest.mark.parametrize("path", BODIES)
def test_streams(make_app, path):
    _, app = make_app("Hello, wörld 🎉")
    lines = post(app, path, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if path == "/v1/chat/completions":
        pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    elif path == "/v1/messages":
        pieces = [e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta"]
    else:
        pieces = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(pieces) == "Hello, wörld 🎉"


def test_refusals(make_app):
    rig, app = make_app(most_waiting=1)
    rig.cluster.held = {"Begin"}

    async def crowd():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            first = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
            await until(lambda: rig.engine.progress.waiting == 1, first)
            second = await client.post("/v1/chat/completions", json=CHAT)
            rig.cluster.release()
            return await first, second

    first, second = asyncio.run(crowd())
    assert first.status_code == 200
    assert second.status_code == 429 and int(second.headers["retry-after"]) >= 1
    bad = post(app, "/v1/chat/completions", stop_token_ids=[10**6])
    assert bad.status_code == 400 and "stop_token_ids" in bad.json()["error"]["message"]
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    assert post(app, "/v1/chat/completions", response_format=format).status_code == 400
    rig.engine.failed = "no worker can be started"
    assert post(app, "/v1/chat/completions").status_code == 503
    rig.engine.failed = None
    rig.engine.stop_taking()
    closing = post(app, "/v1/chat/completions")
    assert closing.status_code == 503 and "shutting down" in closing.json()["error"]["message"]
    assert int(closing.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects(make_app, stream):
    rig, app = make_app(lambda spec: list(range(3, 203)))
    rig.cluster.held = {"RunDecode"}
    body = json.dumps({**CHAT, "stream": stream}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "root_path": "",
    }

    async def scenario():
        gone, given = asyncio.Event(), False

        async def receive():
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        task = asyncio.ensure_future(app(scope, receive, send))
        await until(lambda: rig.cluster.waits_for("RunDecode"), task)
        gone.set()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60)

    asyncio.run(scenario())
    assert rig.engine.idle
    rig.cluster.release()
    wait_until(rig.free, what=rig.cluster.holding)
    assert rig.engine.entry.outcomes["cancelled"] == 1


def test_health(make_app):
    rig, app = make_app()

    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/health")

    assert asyncio.run(ask()).status_code == 200
    rig.engine.failed = "gone"
    assert asyncio.run(ask()).status_code == 503
