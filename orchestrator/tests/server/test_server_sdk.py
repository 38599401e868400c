"""The clients that people use, against a real socket."""

import asyncio
import json
import threading

import anthropic
import httpx
import openai
import pytest
import sdk_calls
from sdk_calls import MODEL, USER, open_ai

CALL = (
    '<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.fixture
def server(live):
    return live()


def test_openai_chat_and_stream(server):
    server.engine.cached = 1
    got = sdk_calls.chat(server.url)
    assert got["text"] == "Hello, world" and got["cached"] == 1


def test_openai_responses_and_stream(server):
    assert sdk_calls.responses(server.url)["text"] == "Hello, world"


def test_anthropic_messages_and_stream(server):
    server.engine.cached = 1
    got = sdk_calls.messages(server.url)
    assert got["text"] == "Hello, world" and got["cached"] == 1
    assert got["prompt"] == len(server.engine.prompts[0])


def test_openai_tool_round_trip(server):
    server.engine._constrained = lambda params: server.rig.tokenizer.encode_with_specials(server.rig.text)
    server.rig.text = "\n\n<｜DSML｜ calls>\n" + CALL
    message, arguments = sdk_calls.chat_tool_call(server.url)
    assert arguments == {"city": "Paris"}
    server.rig.text = "Rain."
    assert sdk_calls.chat_tool_answer(server.url, message) == "Rain."
    prompt = server.rig.tokenizer.decode(server.engine.prompts[-1])
    assert CALL in prompt and "<tool_result>rain</tool_result>" in prompt


def test_anthropic_tool_round_trip(server):
    server.engine._constrained = lambda params: server.rig.tokenizer.encode_with_specials(server.rig.text)
    server.rig.text = "\n\n<｜DSML｜ calls>\n" + CALL
    message, arguments = sdk_calls.messages_tool_call(server.url)
    assert arguments == {"city": "Paris"}
    server.rig.text = "Rain."
    assert sdk_calls.messages_tool_answer(server.url, message) == "Rain."


def test_openai_structured_output(server):
    assert len(sdk_calls.structured(server.url)) == 2


def test_errors_become_the_sdk_types(server):
    first, second = sdk_calls.refusals(server.url)
    assert "logit_bias" in first and "supported API model names" in second
    server.engine.capacity = 0
    with pytest.raises(openai.RateLimitError):
        open_ai(server.url).chat.completions.create(model=MODEL, messages=USER)


def test_keys_of_both_sdks(live):
    server = live(api_keys=("any-key-1234",))
    with pytest.raises(openai.AuthenticationError):
        open_ai(server.url).models.list()
    assert openai.OpenAI(base_url=f"{server.url}/v1", api_key="any-key-1234").models.list().data
    assert anthropic.Anthropic(base_url=server.url, api_key="any-key-1234").models.list().data


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_leaving_clients_free_the_engine(server, wait_until, path, stream):
    server.rig.text = "word " * 900
    server.engine.delay = 0.02
    body = {"model": MODEL, "stream": stream, "max_tokens": 900, "messages": USER}
    if path == "/v1/responses":
        body = {"model": MODEL, "stream": stream, "input": "Hi"}
    with httpx.Client(base_url=server.url, timeout=0.3) as client:
        if stream:
            with client.stream("POST", path, json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body)
    wait_until(lambda: not server.engine.running and server.rig.in_flight == 0, 2.0)
    assert len(server.engine.aborted) == 1


def test_leaving_before_the_engine_answers(server, wait_until):
    server.engine.hold = asyncio.Event()
    with httpx.Client(base_url=server.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": USER, "stream": True})
    wait_until(lambda: not server.engine.running and server.rig.in_flight == 0, 2.0)


def test_two_hundred_at_once_lose_nothing(live):
    server = live(max_requests=500)
    server.engine.delay = 0.002
    texts = {f"question {i}": f"answer {i} é漢🎉" for i in range(200)}
    encode, decode = server.rig.tokenizer.encode, server.rig.tokenizer.decode
    server.engine.script = lambda prompt, _: encode(texts[decode(prompt).removesuffix("</think>")])

    async def run():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:

            async def ask(number, question):
                body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": number % 2 == 0}
                response = await client.post("/v1/chat/completions", json=body)
                if number % 2:
                    return response.json()["choices"][0]["message"]["content"]
                parts = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
                return "".join(json.loads(p)["choices"][0]["delta"].get("content") or "" for p in parts)

            return await asyncio.gather(*(ask(i, q) for i, q in enumerate(texts)))

    assert asyncio.run(run()) == list(texts.values())
    assert not server.engine.running and not server.engine.aborted and server.rig.in_flight == 0


def test_a_large_body_is_refused_on_the_wire(live):
    server = live(max_body_bytes=10_000)
    response = httpx.post(f"{server.url}/v1/messages", content=b"x" * 1_000_000)
    assert response.status_code == 413


def test_large_prompts_do_not_stop_small_ones(live):
    server = live(max_context=2_000_000)
    small, done = [], threading.Event()

    def tiny():
        while not done.is_set():
            small.append(httpx.get(f"{server.url}/health/live").elapsed.total_seconds())

    thread = threading.Thread(target=tiny)
    thread.start()
    text = "All happy families are alike. " * 20_000
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 5}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    done.set()
    thread.join()
    assert response.status_code == 200 and len(server.engine.prompts[0]) > 100_000
    assert max(small) < 2.0
