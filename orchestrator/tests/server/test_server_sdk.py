"""The clients that people use, against a real socket."""

import asyncio
import json
import threading

import anthropic
import httpx
import openai
import pydantic
import pytest

MODEL = "v41-mini"
USER = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = (
    '<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def open_ai(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any-key", max_retries=0, **options)


def claude(server, **options):
    return anthropic.Anthropic(base_url=server.url, api_key="any-key", max_retries=0, **options)


@pytest.fixture
def server(live):
    return live()


def test_openai_chat_and_stream(server):
    server.engine.cached = 1
    client = open_ai(server)
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
    assert client.models.list().data[0].id == MODEL


def test_openai_responses_and_stream(server):
    client = open_ai(server)
    assert client.responses.create(model=MODEL, input="Hi").output_text == "Hello, world"
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == "Hello, world"


def test_anthropic_messages_and_stream(server):
    server.engine.cached = 1
    client = claude(server)
    message = client.messages.create(model=MODEL, max_tokens=50, messages=USER)
    assert message.content[0].text == "Hello, world" and message.usage.cache_read_input_tokens == 1
    with client.messages.stream(model=MODEL, max_tokens=50, messages=USER) as stream:
        assert "".join(stream.text_stream) == "Hello, world"
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    assert client.messages.count_tokens(model=MODEL, messages=USER).input_tokens == len(server.engine.prompts[0])


def test_openai_tool_round_trip(server):
    server.engine._constrained = lambda params: server.rig.tokenizer.encode_with_specials(server.rig.text)
    client = open_ai(server)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    server.rig.text = "\n\n<｜DSML｜ calls>\n" + CALL
    message = client.chat.completions.create(model=MODEL, messages=USER, tools=tools).choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    server.rig.text = "Rain."
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*USER, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=tools)
    assert answer.choices[0].message.content == "Rain."
    prompt = server.rig.tokenizer.decode(server.engine.prompts[-1])
    assert CALL in prompt and "<tool_result>rain</tool_result>" in prompt


def test_anthropic_tool_round_trip(server):
    server.engine._constrained = lambda params: server.rig.tokenizer.encode_with_specials(server.rig.text)
    client = claude(server)
    tools = [{"name": "weather", "input_schema": WEATHER}]
    server.rig.text = "\n\n<｜DSML｜ calls>\n" + CALL
    options = {"model": MODEL, "max_tokens": 500, "tools": tools}
    with client.messages.stream(messages=USER, **options) as stream:
        message = stream.get_final_message()
    block = message.content[-1]
    assert message.stop_reason == "tool_use" and block.input == {"city": "Paris"}
    server.rig.text = "Rain."
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"}]}
    history = [*USER, {"role": "assistant", "content": [b.model_dump() for b in message.content]}, result]
    assert client.messages.create(messages=history, **options).content[0].text == "Rain."


def test_openai_structured_output(server):
    class Point(pydantic.BaseModel):
        x: int
        label: bool

    client = open_ai(server)
    parsed = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Point, seed=3)
    assert isinstance(parsed.choices[0].message.parsed, Point)
    assert isinstance(client.responses.parse(model=MODEL, input="Hi", text_format=Point).output_parsed, Point)


def test_errors_become_the_sdk_types(server):
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        open_ai(server).chat.completions.create(model=MODEL, messages=USER, logit_bias={"5": 1})
    with pytest.raises(anthropic.BadRequestError, match="supported API model names"):
        claude(server).messages.create(model="claude-x", max_tokens=5, messages=USER)
    server.engine.capacity = 0
    with pytest.raises(openai.RateLimitError):
        open_ai(server).chat.completions.create(model=MODEL, messages=USER)


def test_keys_of_both_sdks(live):
    server = live(api_keys=("any-key-1234",))
    with pytest.raises(openai.AuthenticationError):
        open_ai(server).models.list()
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
