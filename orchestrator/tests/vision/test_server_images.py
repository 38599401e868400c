"""Images over HTTP, in the three protocols."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.model.presets import v41_mini
from orchestrator.model.vision import fit
from orchestrator.server import ServerSettings, create_app
from orchestrator.server.run import make_server
from orchestrator.server.scripted import ScriptedEngine
from orchestrator.text import bundled_tokenizer
from orchestrator.vision import ImageLimits, ImageReader

MODEL = "v41-mini"
PATHS = {
    "chat": ("/v1/chat/completions", "messages"),
    "responses": ("/v1/responses", "input"),
    "messages": ("/v1/messages", "messages"),
}
CONFIG = v41_mini(vision=True)
IMAGE = CONFIG.image_token_id


@pytest.fixture(scope="module")
def tokenizer():
    return bundled_tokenizer(MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return GrammarCompiler(tokenizer)


class Rig:
    def __init__(self, tokenizer, grammars, *, sees: bool = True, server: dict | None = None, **limits) -> None:
        self.engine = ScriptedEngine(tokenizer, lambda prompt, params: tokenizer.encode("Hello"), grammars=grammars)
        self.reader = ImageReader(CONFIG, ImageLimits(**limits)) if sees else None
        options = {"model_name": MODEL, "max_context": 8192, "thinking": False, "max_body_bytes": 32 * 2**20}
        app = create_app(
            self.engine, tokenizer, ServerSettings(**options | (server or {})), grammars=grammars, images=self.reader
        )
        self.client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    def post(self, protocol: str, content: list, **fields):
        path, name = PATHS[protocol]
        more = {"max_tokens": 20} if protocol == "messages" else {}
        return self.client.post(path, content=json.dumps(body(name, content, **more | fields)))

    def count(self, content: list):
        return self.client.post("/v1/messages/count_tokens", json=body("messages", content)).json()["input_tokens"]

    def in_flight(self) -> int:
        return self.client.get("/health").json()["requests_in_flight"]


def body(name: str, content: list, **fields) -> dict:
    return {"model": MODEL, name: [{"role": "user", "content": content}], **fields}


@pytest.fixture
def make_rig(tokenizer, grammars):
    made = []

    def make(**options) -> Rig:
        made.append(Rig(tokenizer, grammars, **options))
        return made[-1]

    yield make
    for rig in made:
        if rig.reader is not None:
            rig.reader.close()


@pytest.fixture
def rig(make_rig):
    return make_rig()


@pytest.fixture
def strict_rig(make_rig):
    return make_rig(fetch=False)


def text_part(protocol: str, text: str) -> dict:
    return {"type": "input_text" if protocol == "responses" else "text", "text": text}


def image_part(protocol: str, data: bytes | str, kind: str = "png", **options) -> dict:
    """`data` is the encoded image, or a URL."""
    coded = base64.b64encode(data).decode() if isinstance(data, bytes) else ""
    url = data if isinstance(data, str) else f"data:image/{kind};base64,{coded}"
    if protocol == "chat":
        return {"type": "image_url", "image_url": {"url": url, **options}}
    if protocol == "responses":
        return {"type": "input_image", "image_url": url, **options}
    if isinstance(data, str):
        return {"type": "image", "source": {"type": "url", "url": data}}
    return {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": coded}}


PROTOCOLS = list(PATHS)


def usage(protocol: str, answer: dict) -> int:
    return answer["usage"]["prompt_tokens" if protocol == "chat" else "input_tokens"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stream", [False, True])
def test_images_become_spans(rig, kit, protocol, stream):
    sizes = [(300, 200), (900, 1000)]
    pictures = [kit.encoded(kit.noise(*size, seed=n)) for n, size in enumerate(sizes)]
    content = [text_part(protocol, "One:"), image_part(protocol, pictures[0]), text_part(protocol, "two:")]
    content += [image_part(protocol, pictures[1]), text_part(protocol, "Compare.")]
    response = rig.post(protocol, content, stream=stream)
    assert response.status_code == 200, response.text
    (prompt,), (images,) = rig.engine.prompts, rig.engine.images
    lengths = [fit(*size, CONFIG.vision).tokens for size in sizes]
    assert [p.image.geometry.tokens for p in images] == lengths and prompt.count(IMAGE) == sum(lengths)
    runs = [prompt[p.start : p.end] for p in images]
    assert all(set(run) == {IMAGE} for run in runs)
    spoken = bundled_tokenizer(MODEL).decode(prompt)
    assert spoken.index("One:") < spoken.index("two:") < spoken.index("Compare.")
    if stream:
        assert str(len(prompt)) in response.text
    else:
        assert usage(protocol, response.json()) == len(prompt)
    assert rig.in_flight() == 0


def test_the_three_protocols_agree(rig, kit):
    picture = kit.encoded(kit.noise(300, 200))
    for protocol in PROTOCOLS:
        rig.post(protocol, [text_part(protocol, "What is this?"), image_part(protocol, picture)])
    assert rig.engine.prompts[0] == rig.engine.prompts[1] == rig.engine.prompts[2]
    assert len({images[0].image.digest for images in rig.engine.images}) == 1
    content = [text_part("messages", "What is this?"), image_part("messages", picture)]
    assert rig.count(content) == len(rig.engine.prompts[0])


def test_images_in_tool_results_and_earlier_turns(rig, kit):
    a, b = (kit.encoded(kit.noise(300, 200, seed)) for seed in (1, 2))
    messages = [
        {"role": "user", "content": [image_part("messages", a), text_part("messages", "Look.")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "shot", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image_part("messages", b)]}],
        },
    ]
    tools = [{"name": "shot", "input_schema": {"type": "object"}}]
    response = rig.client.post(
        "/v1/messages", json={"model": MODEL, "max_tokens": 9, "messages": messages, "tools": tools}
    )
    assert response.status_code == 200, response.text
    first, second = rig.engine.images[0]
    assert first.image.digest != second.image.digest and first.end <= second.start


def test_low_detail_takes_fewer_tokens(rig, kit):
    picture = kit.encoded(kit.noise(1500, 1000))
    for detail in ("high", "low"):
        assert rig.post("chat", [image_part("chat", picture, detail=detail)]).status_code == 200
        assert rig.post("responses", [image_part("responses", picture, detail=detail)]).status_code == 200
    lengths = [len(prompt) for prompt in rig.engine.prompts]
    assert lengths[0] == lengths[1] > 2 * lengths[2] == 2 * lengths[3]


def test_a_user_cannot_write_a_placeholder(rig, kit):
    """Its spelling in text is text; the images stay where they belong."""
    spelt = bundled_tokenizer(MODEL).image_spelling
    content = [text_part("chat", f"{spelt} and {spelt}"), image_part("chat", kit.encoded(kit.noise(300, 200)))]
    assert rig.post("chat", content).status_code == 200
    (placed,) = rig.engine.images[0]
    prompt = rig.engine.prompts[0]
    assert prompt.count(IMAGE) == placed.image.geometry.tokens == placed.end - placed.start
    assert set(prompt[placed.start : placed.end]) == {IMAGE}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty|[Uu]nsupported"), (b"GIF89a", "cannot be decoded"), (b"hello", "cannot be decoded"),
        ("http://127.0.0.1:9/x", "could not be fetched"), ("http://169.254.169.254/", "could not be fetched"),
        ("ftp://example.org/x.png", "http|[Uu]nsupported|invalid url"),
        ("http://user:pw@example.org/x.png", "without a user name"),
    ],
)  # fmt: skip
def test_bad_images_are_a_client_error(rig, protocol, data, words):
    response = rig.post(protocol, [image_part(protocol, data), text_part(protocol, "?")])
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert re.search(words, message), message
    assert "127.0.0.1" not in message and "169.254" not in message
    assert not rig.engine.prompts and rig.in_flight() == 0
    assert ("type" in response.json()) == (protocol == "messages")


def test_limits_have_their_statuses(make_rig, kit):
    picture = kit.encoded(kit.noise(300, 200))
    part = image_part("chat", picture)
    cases = [
        ({"max_images": 1}, [part, part], 400, "2 images, allowed are 1"),
        ({"max_image_bytes": 1000}, [part], 413, "larger than 1000 bytes"),
        ({"max_total_bytes": len(picture) + 5}, [part, part], 413, "together"),
        ({"max_pixels": 50_000}, [part], 400, "60000 pixels, allowed are 50000"),
        ({"max_side": 250}, [part], 400, "300 x 200 pixels"),
        ({"fetch": False}, [image_part("chat", "http://example.org/x")], 400, "fetches no images"),
    ]
    for limits, content, status, words in cases:
        rig = make_rig(**limits)
        response = rig.post("chat", content)
        assert (response.status_code, words in response.json()["error"]["message"]) == (status, True), response.text
        assert not rig.engine.prompts
    response = make_rig(max_image_bytes=1000).post("messages", [image_part("messages", picture)])
    assert response.status_code == 413 and response.json()["error"]["type"] == "request_too_large"


def test_images_count_for_the_context(make_rig, kit):
    """By the tokens of their spans, not as one placeholder."""
    rig = make_rig(server={"max_context": 150})
    response = rig.post("chat", [image_part("chat", kit.encoded(kit.noise(300, 200)))], max_tokens=5)
    assert response.status_code == 400 and "150" in response.json()["error"]["message"]


def test_a_server_of_text_says_so(make_rig, kit):
    rig = make_rig(sees=False)
    for protocol in PROTOCOLS:
        response = rig.post(protocol, [image_part(protocol, kit.encoded(kit.noise(30, 20)))])
        assert response.status_code == 400 and "text only" in response.json()["error"]["message"]


def test_slow_downloads_do_not_keep_text_waiting(make_rig, tokenizer):
    """Two readers are busy with a server that says nothing; a third is told to come back, text is answered at once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        rig = make_rig(networks=("127.0.0.1/32",), fetch_seconds=1.0, workers=2)
        statuses: list[int] = []

        def send():
            statuses.append(rig.post("chat", [image_part("chat", url)]).status_code)

        with rig.client:
            threads = [threading.Thread(target=send) for _ in range(6)]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            began = time.monotonic()
            assert rig.post("chat", [text_part("chat", "Hi")]).status_code == 200
            assert time.monotonic() - began < 0.7
            for thread in threads:
                thread.join()
    assert statuses.count(400) >= 2 and set(statuses) <= {400, 503} and len(statuses) == 6
    assert len(rig.engine.prompts) == 1


_URLS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["data:", "data:image/png;base64,", "data:,x", "http://", "https://[::1]/", "http://0/", "\ud800"]),
    st.none(),
    st.integers(),
    st.lists(st.text(max_size=3), max_size=2),
)
_PARTS = st.one_of(
    st.builds(lambda url, detail: {"type": "image_url", "image_url": {"url": url, "detail": detail}}, _URLS, _URLS),
    st.builds(lambda url: {"type": "image_url", "image_url": url}, _URLS),
    st.builds(lambda url, detail: {"type": "input_image", "image_url": url, "detail": detail}, _URLS, _URLS),
    st.builds(
        lambda data: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}, _URLS
    ),
    st.builds(lambda url: {"type": "image", "source": {"type": "url", "url": url}}, _URLS),
    st.builds(lambda kind: {"type": "image", "source": {"type": kind, "file_id": "f"}}, _URLS),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PROTOCOLS), st.lists(_PARTS, min_size=1, max_size=3))
def test_malformed_parts_are_client_errors(strict_rig, protocol, parts):
    """Whatever stands where an image should: a refusal in words, nothing at the engine, no slot kept."""
    response = strict_rig.post(protocol, parts)
    assert response.status_code == 400 and response.json()["error"]["message"], response.text
    assert not strict_rig.engine.prompts and strict_rig.in_flight() == 0


def test_the_clients_that_people_use(kit, tokenizer, grammars):
    """OpenAI's and Anthropic's own, over a socket."""
    anthropic, openai = pytest.importorskip("anthropic"), pytest.importorskip("openai")
    rig = Rig(tokenizer, grammars)
    picture = kit.encoded(kit.noise(300, 200))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = make_server(rig.client.app, ServerSettings(model_name=MODEL), log_level="warning")
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=3)
            messages = [{"role": "user", "content": [image_part("chat", picture), text_part("chat", "What?")]}]
            client.chat.completions.create(model=MODEL, messages=messages)
            parts = [image_part("responses", picture, detail="auto"), text_part("responses", "What?")]
            client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}])
            other = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
            messages = [{"role": "user", "content": [image_part("messages", picture), text_part("messages", "What?")]}]
            answer = other.messages.create(model=MODEL, max_tokens=9, messages=messages)
            assert answer.usage.input_tokens == len(rig.engine.prompts[2])
            counted = other.messages.count_tokens(model=MODEL, messages=messages)
            assert counted.input_tokens == answer.usage.input_tokens
            broken = [{"role": "user", "content": [image_part("messages", b"nonsense")]}]
            with pytest.raises(anthropic.BadRequestError, match="cannot be decoded"):
                other.messages.create(model=MODEL, max_tokens=9, messages=broken)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(timeout=10)
            rig.reader.close()
    assert rig.engine.prompts[0] == rig.engine.prompts[1] == rig.engine.prompts[2]


def test_numbers_for_prometheus(make_rig, nano, kit, tokenizer, grammars, picture):
    from orchestrator.engine.async_engine import AsyncEngine

    running = AsyncEngine(kit.engine_of(nano))
    try:
        _, images = kit.prompt_of(nano.config, [4, picture(), 3, picture()])
        spans = running.engine.encode(images, kit.greedy())
        app = create_app(running, tokenizer, ServerSettings(model_name=MODEL), grammars=grammars)
        page = TestClient(app, base_url="http://127.0.0.1").get("/metrics").text
        size = images[0].image.geometry
        for line in (
            "fathom_images_total 2.0", "fathom_image_hits_total 1.0", f"fathom_image_patches_total {size.patches}.0",
            f"fathom_image_held_bytes {size.tokens * 256}.0", "fathom_image_patches_in_work 0.0",
        ):  # fmt: skip
            assert f"\n{line}\n" in page, page
        running.engine.release(spans, kit.greedy())
    finally:
        running.close()
    assert "fathom_image" not in make_rig().client.get("/metrics").text
